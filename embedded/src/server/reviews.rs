//! Questions about who may do what: answered, never stored.

use std::sync::Arc;

use axum::body::Body;
use serde_json::{Map, Value, json};

use super::request::Call;
use super::respond;
use super::{Inner, Response, now, storage_status};
use crate::auth::{Attributes, User};
use crate::semantics::value::{self, strings, text};
use crate::semantics::write::{self, FieldValidation};
use crate::semantics::{FieldError, Resource, Status};

/// Members may do everything.
const MASTERS: &str = "system:masters";

fn user_info(user: &User) -> Value {
    let mut v = json!({"username": user.name, "groups": user.groups});
    if !user.uid.is_empty() {
        v["uid"] = user.uid.clone().into();
    }
    if !user.extra.is_empty() {
        v["extra"] = user.extra.iter().map(|(k, v)| (k.clone(), json!(v))).collect::<Map<_, _>>().into();
    }
    v
}

impl Inner {
    /// Why somebody may do something; none when they may not.
    pub(super) async fn allowed(&self, user: &User, wanted: &Attributes) -> Result<Option<String>, Status> {
        if user.groups.iter().any(|g| g == MASTERS) {
            return Ok(Some(String::new()));
        }
        let grants = self.rbac.grants(self.storage.as_ref()).await.map_err(storage_status)?;
        Ok(grants.allows(user, wanted).map(str::to_owned))
    }

    /// Lets a request through or refuses it with 403.
    pub(super) async fn authorize(&self, user: &User, wanted: &Attributes) -> Result<(), Status> {
        if self.allowed(user, wanted).await?.is_some() {
            return Ok(());
        }
        let sentence = wanted.sentence(user);
        Err(if wanted.resource.is_empty() {
            Status { details: json!({}), ..Status::new(403, "Forbidden", format!("forbidden: {sentence}")) }
        } else {
            Status::forbidden(&wanted.group, &wanted.resource, &wanted.name, &sentence)
        })
    }

    /// Who a request acts as: `Impersonate-User` and `-Group`, if the sender may.
    pub(super) async fn impersonate(&self, user: User, headers: &http::HeaderMap) -> Result<User, Status> {
        let word = |v: &http::HeaderValue| v.to_str().unwrap_or_default().to_owned();
        let Some(name) = headers.get("impersonate-user").map(word) else { return Ok(user) };
        let groups: Vec<String> = headers.get_all("impersonate-group").iter().map(word).collect();
        let mut wanted = vec![match name.strip_prefix("system:serviceaccount:").and_then(|n| n.split_once(':')) {
            Some((namespace, account)) => ("serviceaccounts", namespace.to_owned(), account.to_owned()),
            None => ("users", String::new(), name.clone()),
        }];
        wanted.extend(groups.iter().map(|g| ("groups", String::new(), g.clone())));
        for (resource, namespace, name) in wanted {
            let attributes = Attributes {
                verb: "impersonate".into(),
                resource: resource.into(),
                namespace,
                name,
                ..Attributes::default()
            };
            self.authorize(&user, &attributes).await?;
        }
        let account = name.strip_prefix("system:serviceaccount:").and_then(|n| n.split_once(':'));
        Ok(match account {
            Some((namespace, account)) if groups.is_empty() => User::service_account(namespace, account, ""),
            _ => User::new(&name, &groups.iter().map(String::as_str).collect::<Vec<_>>()),
        })
    }

    pub(super) async fn review(
        self: &Arc<Self>,
        resource: &Arc<Resource>,
        call: &Call,
        body: Body,
    ) -> Result<Response, Status> {
        let bytes = respond::body(body).await?;
        let (object, duplicates) = respond::decode(&call.headers, &bytes)?;
        let decoded = write::shape(resource, object, &duplicates)?;
        let mode = FieldValidation::parse(call.query.text("fieldValidation"))?;
        let warnings =
            write::strictness(mode, &decoded.strict).map_err(|text| write::cannot_be_handled(resource, &text))?;
        let mut review = decoded.object;
        let status = match resource.kind.as_str() {
            "SelfSubjectReview" => json!({"userInfo": user_info(&call.user)}),
            "TokenReview" => {
                let audiences = strings(&review, "/spec/audiences");
                match self.authenticator.user(text(&review, "/spec/token"), &audiences, now()) {
                    Some((user, audiences)) => {
                        json!({"authenticated": true, "user": user_info(&user), "audiences": audiences})
                    }
                    None => json!({"authenticated": false, "user": {}, "error": "[invalid bearer token, unknown]"}),
                }
            }
            "SelfSubjectRulesReview" => self.rules(&call.user, text(&review, "/spec/namespace")).await?,
            kind => {
                let user = if kind == "SelfSubjectAccessReview" {
                    call.user.clone()
                } else {
                    let user = User {
                        name: text(&review, "/spec/user").to_owned(),
                        groups: strings(&review, "/spec/groups"),
                        uid: text(&review, "/spec/uid").to_owned(),
                        extra: Vec::new(),
                    };
                    if user.name.is_empty() && user.groups.is_empty() {
                        let error = FieldError::invalid(
                            "spec.user",
                            &"".into(),
                            "at least one of user or group must be specified",
                        );
                        return Err(Status::invalid(&resource.group, kind, "", &[error]));
                    }
                    user
                };
                let wanted = attributes(&review, resource)?;
                match self.allowed(&user, &wanted).await? {
                    Some(reason) if reason.is_empty() => json!({"allowed": true}),
                    Some(reason) => json!({"allowed": true, "reason": reason}),
                    None => json!({"allowed": false}),
                }
            }
        };
        value::meta(&mut review).insert("creationTimestamp".into(), Value::Null);
        value::object(&mut review).insert("status".into(), status);
        let mut response = respond::json(201, &review);
        respond::warn(&mut response, &warnings);
        Ok(response)
    }

    async fn rules(&self, user: &User, namespace: &str) -> Result<Value, Status> {
        let mut resources = Vec::new();
        let mut paths = Vec::new();
        if user.groups.iter().any(|g| g == MASTERS) {
            resources.push(json!({"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]}));
            paths.push(json!({"verbs": ["*"], "nonResourceURLs": ["*"]}));
        }
        let grants = self.rbac.grants(self.storage.as_ref()).await.map_err(storage_status)?;
        for rule in grants.rules(user, namespace) {
            let (of_resources, v) = rule.review();
            if of_resources {
                resources.push(v);
            } else {
                paths.push(v);
            }
        }
        Ok(json!({"resourceRules": resources, "nonResourceRules": paths, "incomplete": false}))
    }
}

fn attributes(review: &Value, resource: &Resource) -> Result<Attributes, Status> {
    if let Some(a) = review.pointer("/spec/resourceAttributes").filter(|a| a.is_object()) {
        return Ok(Attributes {
            verb: text(a, "/verb").into(),
            group: text(a, "/group").into(),
            resource: text(a, "/resource").into(),
            subresource: text(a, "/subresource").into(),
            namespace: text(a, "/namespace").into(),
            name: text(a, "/name").into(),
            path: String::new(),
        });
    }
    if let Some(a) = review.pointer("/spec/nonResourceAttributes").filter(|a| a.is_object()) {
        return Ok(Attributes {
            verb: text(a, "/verb").into(),
            path: text(a, "/path").into(),
            ..Attributes::default()
        });
    }
    let why = "exactly one of nonResourceAttributes or resourceAttributes must be specified";
    let error = FieldError::invalid("spec.resourceAttributes", &Value::Null, why);
    Err(Status::invalid(&resource.group, &resource.kind, "", &[error]))
}

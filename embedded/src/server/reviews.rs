//! Questions about who may do what: answered, never stored.

use std::sync::Arc;

use axum::body::Body;
use serde_json::{Map, Value, json};

use super::request::Call;
use super::respond;
use super::{Inner, Response, now, storage_status};
use crate::auth::{Attributes, Rule, User};
use crate::semantics::owners;
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
        Ok(grants.allows(user, wanted))
    }

    /// Refuses a role or a binding that gives more than who writes it has, unless he may `escalate` or `bind`.
    pub(super) async fn no_escalation(
        &self,
        resource: &Resource,
        call: &Call,
        object: &Value,
        old: Option<&Value>,
    ) -> Result<(), Status> {
        let masters = call.user.groups.iter().any(|g| g == MASTERS);
        if resource.group != "rbac.authorization.k8s.io" || masters {
            return Ok(());
        }
        let same = |key: &str| old.is_some_and(|o| o.get(key) == object.get(key));
        if ["rules", "aggregationRule", "roleRef", "subjects"].into_iter().all(same) {
            return Ok(());
        }
        let namespace = value::namespace(object);
        let grants = self.rbac.grants(self.storage.as_ref()).await.map_err(storage_status)?;
        let may = |verb: &str, resource: String, name: &str| Attributes {
            verb: verb.into(),
            group: "rbac.authorization.k8s.io".into(),
            resource,
            namespace: namespace.into(),
            name: name.into(),
            ..Attributes::default()
        };
        let rules = if resource.kind.ends_with("Binding") {
            let (kind, role) = (text(object, "/roleRef/kind"), text(object, "/roleRef/name"));
            let plural = format!("{}s", kind.to_lowercase());
            if self.allowed(&call.user, &may("bind", plural.clone(), role)).await?.is_some() {
                return Ok(());
            }
            grants
                .role(kind, namespace, role)
                .ok_or_else(|| Status::not_found(&resource.group, &resource.plural, role))?
        } else {
            if self.allowed(&call.user, &may("escalate", resource.plural.clone(), &call.target.name)).await?.is_some() {
                return Ok(());
            }
            Rule::of_role(object)
        };
        match grants.beyond(&call.user, namespace, &rules) {
            Some(why) => Err(Status::forbidden(&resource.group, &resource.plural, value::name(object), &why)),
            None => Ok(()),
        }
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
        let Some(name) = headers.get("impersonate-user").map(word) else {
            let half = |k: &http::HeaderName| k.as_str().starts_with("impersonate-");
            if headers.keys().any(half) {
                // Who wanted less than all rights would have them all.
                let why = "requested impersonation of a group, a uid or extra without impersonating a user";
                return Err(Status::internal(why));
            }
            return Ok(user);
        };
        let groups: Vec<String> = headers.get_all("impersonate-group").iter().map(word).collect();
        let uid = headers.get("impersonate-uid").map(word);
        let extra: Vec<(String, Vec<String>)> = headers
            .keys()
            .filter_map(|k| k.as_str().strip_prefix("impersonate-extra-").map(|key| (k, key)))
            .map(|(k, key)| (super::request::percent(key), headers.get_all(k).iter().map(word).collect()))
            .collect();
        let mut wanted = vec![match name.strip_prefix("system:serviceaccount:").and_then(|n| n.split_once(':')) {
            Some((namespace, account)) => ("serviceaccounts", namespace.to_owned(), account.to_owned()),
            None => ("users", String::new(), name.clone()),
        }];
        wanted.extend(groups.iter().map(|g| ("groups", String::new(), g.clone())));
        let mut wanted: Vec<Attributes> = wanted
            .into_iter()
            .map(|(resource, namespace, name)| Attributes {
                resource: resource.into(),
                namespace,
                name,
                ..Attributes::default()
            })
            .collect();
        let identity = |resource: &str, sub: &str, name: &str| Attributes {
            group: "authentication.k8s.io".into(),
            resource: resource.into(),
            subresource: sub.into(),
            name: name.into(),
            ..Attributes::default()
        };
        wanted.extend(uid.iter().map(|uid| identity("uids", "", uid)));
        for (key, values) in &extra {
            wanted.extend(values.iter().map(|v| identity("userextras", key, v)));
        }
        for attributes in wanted {
            self.authorize(&user, &Attributes { verb: "impersonate".into(), ..attributes }).await?;
        }
        let account = name.strip_prefix("system:serviceaccount:").and_then(|n| n.split_once(':'));
        let mut acting = match account {
            Some((namespace, account)) if groups.is_empty() => User::service_account(namespace, account, ""),
            _ => User::new(&name, &groups.iter().map(String::as_str).collect::<Vec<_>>()),
        };
        acting.uid = uid.unwrap_or_default();
        acting.extra = extra;
        Ok(acting)
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
        let mode = FieldValidation::parse(call.query.text("fieldValidation"), call.options())?;
        let warnings =
            write::strictness(mode, &decoded.strict).map_err(|text| write::cannot_be_handled(resource, &text))?;
        let mut review = decoded.object;
        let wanted = |what: &str| Err(Status::bad_request(what));
        match resource.kind.as_str() {
            "SelfSubjectRulesReview" if text(&review, "/spec/namespace").is_empty() => {
                return wanted("no namespace on request");
            }
            "TokenReview" if text(&review, "/spec/token").is_empty() => {
                return wanted("token is required for TokenReview in authentication");
            }
            _ => {}
        }
        let status = match resource.kind.as_str() {
            "SelfSubjectReview" => json!({"userInfo": user_info(&call.user)}),
            "TokenReview" => {
                let audiences = strings(&review, "/spec/audiences");
                match self.authenticator.user(text(&review, "/spec/token"), &audiences, now()) {
                    Some((user, audiences)) => {
                        json!({"authenticated": true, "user": user_info(&user), "audiences": audiences})
                    }
                    None => json!({"user": {}, "error": "invalid bearer token"}),
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
                        return Err(Status::invalid(&resource.group, "", "", &[error]));
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
        match resource.kind.as_str() {
            // What was asked is not shown again.
            "SelfSubjectRulesReview" => drop(value::object(&mut review).insert("spec".into(), json!({}))),
            "SelfSubjectReview" => {
                let time = crate::semantics::rfc3339(now());
                value::meta(&mut review).insert("creationTimestamp".into(), time.into());
            }
            _ => {
                let writer = super::write::Writing::new(resource, call, write::Part::Main)?.writer();
                owners::track(resource, None, None, &mut review, &writer);
            }
        }
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
    let refuse = |error: FieldError| Err(Status::invalid(&resource.group, "", "", &[error]));
    let there = |key: &str| review.pointer(key).filter(|a| a.is_object());
    if let (Some(path), Some(_)) = (there("/spec/nonResourceAttributes"), there("/spec/resourceAttributes")) {
        let said = json!({"Path": text(path, "/path"), "Verb": text(path, "/verb")});
        let why = "cannot be specified in combination with resourceAttributes";
        return refuse(FieldError::invalid("spec.nonResourceAttributes", &said, why));
    }
    let asked = text(review, "/spec/resourceAttributes/namespace");
    if resource.kind == "LocalSubjectAccessReview" && asked != value::namespace(review) {
        let why = "must match metadata.namespace";
        return refuse(FieldError::invalid("spec.resourceAttributes.namespace", &asked.into(), why));
    }
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
    Err(Status::invalid(&resource.group, "", "", &[error]))
}

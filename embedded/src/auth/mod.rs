//! Who somebody is, and what they may do.
//!
//! * [`certificate`]: a client certificate says the user (CN) and the groups (O);
//! * [`token`]: bearer tokens, fixed ones and those of service accounts, which are signed with the cluster's key;
//! * [`rbac`]: roles and bindings as they are stored; `system:masters` may do everything;
//! * [`bootstrap`]: the roles and bindings that every cluster has.
//!
//! Somebody without credentials is `system:anonymous`, who may ask for health and version; wrong credentials are 401.

pub mod bootstrap;
pub mod certificate;
pub mod rbac;
pub mod token;

pub use rbac::{Rbac, Rule};
pub use token::Authenticator;

/// Somebody who asks for something.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct User {
    /// Name.
    pub name: String,
    /// UID, "" where there is none.
    pub uid: String,
    /// Groups.
    pub groups: Vec<String>,
    /// Whatever else the credentials say.
    pub extra: Vec<(String, Vec<String>)>,
}

impl User {
    /// Somebody with a name and groups (`system:authenticated` is added).
    #[must_use]
    pub fn new(name: &str, groups: &[&str]) -> Self {
        let mut groups: Vec<String> = groups.iter().map(|g| (*g).to_owned()).collect();
        if !groups.iter().any(|g| g == "system:authenticated") {
            groups.push("system:authenticated".into());
        }
        Self { name: name.into(), groups, ..Self::default() }
    }

    /// A part of the control plane, which may do everything.
    #[must_use]
    pub fn system(name: &str) -> Self {
        Self::new(name, &["system:masters"])
    }

    /// Somebody who showed no credentials.
    #[must_use]
    pub fn anonymous() -> Self {
        Self { name: "system:anonymous".into(), groups: vec!["system:unauthenticated".into()], ..Self::default() }
    }

    /// A service account.
    #[must_use]
    pub fn service_account(namespace: &str, name: &str, uid: &str) -> Self {
        let all = format!("system:serviceaccounts:{namespace}");
        let mut user =
            Self::new(&format!("system:serviceaccount:{namespace}:{name}"), &["system:serviceaccounts", &all]);
        user.uid = uid.into();
        user
    }
}

/// What somebody wants to do.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Attributes {
    /// get, list, watch, create, update, patch, delete, deletecollection, or an HTTP method in lower case.
    pub verb: String,
    /// API group.
    pub group: String,
    /// Resource, "" when it is about a path.
    pub resource: String,
    /// Subresource.
    pub subresource: String,
    /// Namespace, "" for all or none.
    pub namespace: String,
    /// Name, "" for all.
    pub name: String,
    /// Path, when it is about no resource.
    pub path: String,
}

impl Attributes {
    /// The refusal, in kube-apiserver's words.
    #[must_use]
    pub fn sentence(&self, user: &User) -> String {
        if self.resource.is_empty() {
            return format!("User {:?} cannot {} path {:?}", user.name, self.verb, self.path);
        }
        let resource = if self.subresource.is_empty() {
            self.resource.clone()
        } else {
            format!("{}/{}", self.resource, self.subresource)
        };
        let scope = if self.namespace.is_empty() {
            "at the cluster scope".to_owned()
        } else {
            format!("in the namespace {:?}", self.namespace)
        };
        format!("User {:?} cannot {} resource {resource:?} in API group {:?} {scope}", user.name, self.verb, self.group)
    }
}

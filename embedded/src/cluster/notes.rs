//! Events for people.

use std::sync::Arc;

use k8s_openapi::api::core::v1::ObjectReference;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use kube::{Client, Resource};

/// Publishes Events in the name of one component. Failures are logged and forgotten: nobody waits for an Event.
#[derive(Clone)]
pub struct Notes {
    scheduler: Arc<Recorder>,
    controllers: Arc<Recorder>,
}

impl std::fmt::Debug for Notes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Notes")
    }
}

/// In whose name an Event is published.
#[derive(Debug, Clone, Copy)]
pub enum By {
    /// `default-scheduler`.
    Scheduler,
    /// `virtfold-controllers`.
    Controllers,
}

impl Notes {
    /// A publisher.
    #[must_use]
    pub fn new(client: Client) -> Self {
        let recorder = |name: &str| {
            let reporter = Reporter { controller: name.to_owned(), instance: Some(format!("{name}-virtfold")) };
            Arc::new(Recorder::new(client.clone(), reporter))
        };
        Self { scheduler: recorder("default-scheduler"), controllers: recorder("virtfold-controllers") }
    }

    /// Publishes an Event about `object` in the background.
    pub fn say<K>(&self, by: By, object: &K, warning: bool, reason: &str, action: &str, note: String)
    where
        K: Resource<DynamicType = ()>,
    {
        let recorder = match by {
            By::Scheduler => self.scheduler.clone(),
            By::Controllers => self.controllers.clone(),
        };
        let reference: ObjectReference = object.object_ref(&());
        let event = Event {
            type_: if warning { EventType::Warning } else { EventType::Normal },
            reason: reason.to_owned(),
            note: Some(note.chars().take(1000).collect()),
            action: action.to_owned(),
            secondary: None,
        };
        tokio::spawn(async move {
            if let Err(error) = recorder.publish(&event, &reference).await {
                tracing::debug!(%error, reason = event.reason, "an event was not published");
            }
        });
    }
}

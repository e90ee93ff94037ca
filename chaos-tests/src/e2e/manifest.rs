//! Builders of manifests.

use serde_json::{Value, json};

/// The image that `guest/build` makes.
pub const IMAGE: &str = "localhost/virtfold/guest:latest";

/// A VirtualMachine under construction.
#[derive(Clone, Debug)]
pub struct VmManifest {
    /// The object, free to be changed.
    pub object: Value,
}

/// A VM of 128 MiB that boots the project's guest and always runs.
pub fn vm(name: &str) -> VmManifest {
    VmManifest {
        object: json!({
            "apiVersion": "kubevirt.io/v1",
            "kind": "VirtualMachine",
            "metadata": {"name": name, "namespace": "default"},
            "spec": {
                "runStrategy": "Always",
                "template": {
                    "metadata": {"labels": {"test": name}},
                    "spec": {
                        "terminationGracePeriodSeconds": 30,
                        "domain": {
                            "memory": {"guest": "128Mi"},
                            "devices": {
                                "disks": [{"name": "system", "disk": {"bus": "virtio"}}],
                                "interfaces": [{"name": "default", "masquerade": {}}],
                                "rng": {}
                            }
                        },
                        "networks": [{"name": "default", "pod": {}}],
                        "volumes": [{"name": "system", "containerDisk": {"image": IMAGE}}]
                    }
                }
            }
        }),
    }
}

/// The same with a name of 253 characters, all that may be in one among them. (No label can say it.)
pub fn longest() -> VmManifest {
    let name: String = "a0123456789-bcdefghijklmnopqrstuvwxyz.".chars().cycle().take(252).chain(['z']).collect();
    let mut longest = vm(&name);
    longest.object["spec"]["template"]["metadata"]["labels"] = json!({});
    longest
}

impl VmManifest {
    /// The part that becomes the VMI's spec.
    pub fn spec(&mut self) -> &mut Value {
        &mut self.object["spec"]["template"]["spec"]
    }

    /// Another run strategy.
    pub fn run(mut self, strategy: &str) -> Self {
        self.object["spec"]["runStrategy"] = strategy.into();
        self
    }

    /// Another grace period.
    pub fn grace(mut self, seconds: u64) -> Self {
        self.spec()["terminationGracePeriodSeconds"] = seconds.into();
        self
    }

    /// Another memory size.
    pub fn memory(mut self, quantity: &str) -> Self {
        self.spec()["domain"]["memory"]["guest"] = quantity.into();
        self
    }

    /// One more disk with its volume.
    pub fn disk(mut self, name: &str, disk: Value, source: Value) -> Self {
        let mut device = disk;
        device["name"] = name.into();
        let mut volume = source;
        volume["name"] = name.into();
        let spec = self.spec();
        push(&mut spec["domain"]["devices"]["disks"], device);
        push(&mut spec["volumes"], volume);
        self
    }

    /// A script for the first boot.
    pub fn user_data(self, script: &str) -> Self {
        self.disk("cloudinit", json!({"disk": {"bus": "virtio"}}), json!({"cloudInitNoCloud": {"userData": script}}))
    }

    /// Boots from this image instead.
    pub fn image(mut self, image: &str) -> Self {
        self.spec()["volumes"][0]["containerDisk"]["image"] = image.into();
        self
    }

    /// As `kubectl` takes it.
    pub fn text(&self) -> String {
        self.object.to_string()
    }
}

fn push(list: &mut Value, item: Value) {
    if let Some(list) = list.as_array_mut() {
        list.push(item);
    }
}

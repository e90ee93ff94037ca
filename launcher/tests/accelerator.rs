//! The probe: its payload works where something executes it, and a `/dev/kvm` that runs no guest is refused.

use std::path::Path;
use std::time::Instant;

use launcher::accelerator::{probe, run_payload};
use launcher::machine::Accelerator;

const QEMU: &str = "qemu-system-x86_64";

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

#[test]
fn the_payload_passes_under_emulation() {
    let _turn = crate::support::turn();
    for model in ["Nehalem", "Skylake-Client", "max", "qemu64"] {
        let began = Instant::now();
        runtime().block_on(run_payload(Path::new(QEMU), Accelerator::Tcg, model)).unwrap();
        println!("{model}: {:.2?}", began.elapsed());
    }
}

#[test]
fn what_is_no_hypervisor_is_refused() {
    let refused = |qemu: &str, model: &str| {
        runtime().block_on(run_payload(Path::new(qemu), Accelerator::Tcg, model)).unwrap_err()
    };
    assert!(refused("/nonexistent/qemu", "Nehalem").contains("running /nonexistent/qemu"));
    assert!(refused("true", "Nehalem").contains("code 0"));
    assert!(refused(QEMU, "NoSuchModel").contains("NoSuchModel"));
}

/// What the hypervisor says that it can do is what it does where nothing may be missing.
#[test]
fn what_guests_are_offered_is_what_they_get() {
    let _turn = crate::support::turn();
    let o = runtime().block_on(launcher::offers::offers(Path::new(QEMU), Accelerator::Tcg)).unwrap();
    let exact =
        |cpu: &str| runtime().block_on(run_payload(Path::new(QEMU), Accelerator::Tcg, &format!("{cpu},enforce")));
    assert!(o.machine_types.contains(&"q35".to_owned()), "{o:?}");
    assert!(o.machine_types.iter().all(|t| t == "q35" || t.starts_with("pc-q35-")), "{o:?}");
    assert!(!o.cpu_vendor.is_empty());
    assert!(o.cpu_models.contains(&"Nehalem".to_owned()) && !o.cpu_models.contains(&"max".to_owned()), "{o:?}");
    exact("Nehalem").unwrap();
    let missing = ["Skylake-Server", "Icelake-Server", "SapphireRapids"]
        .into_iter()
        .find(|m| !o.cpu_models.iter().any(|have| have == m));
    if let Some(model) = missing {
        assert!(exact(model).is_err(), "{model} is not offered, and can be had");
    }
    assert!(["sse4.2", "lahf-lm", "lahf_lm"].iter().all(|f| o.cpu_features.iter().any(|have| have == f)), "{o:?}");
    let all: String = o.cpu_features.iter().map(|f| format!(",{f}=on")).collect();
    exact(&format!("max{all}")).unwrap();
    assert!(!o.cpu_features.contains(&"vmx".to_owned()) && exact("max,vmx=on").is_err());
    assert!(runtime().block_on(launcher::offers::offers(Path::new("true"), Accelerator::Tcg)).is_err());
}

/// Where the machine's KVM can be trusted this says so; where it cannot, the guests of all other tests must not get it.
#[test]
fn kvm_is_what_really_runs_a_guest() {
    let began = Instant::now();
    let verdict = runtime().block_on(probe(Path::new(QEMU), "Nehalem"));
    println!("{verdict:?} after {:.2?}", began.elapsed());
    assert!(began.elapsed().as_secs() < 8);
    let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap();
    let hardware = cpu.contains(" vmx") || cpu.contains(" svm");
    if !Path::new("/dev/kvm").exists() {
        assert_eq!(verdict.accelerator, Accelerator::Tcg);
        assert!(verdict.reason.contains("cannot be opened"));
    } else if !hardware {
        assert_eq!(verdict.accelerator, Accelerator::Tcg, "a /dev/kvm without vmx or svm was believed");
        assert!(verdict.reason.contains("does not run a guest"));
    }
}

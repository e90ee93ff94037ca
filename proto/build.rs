//! Generates the gRPC code from `proto/*.proto` without a system protoc.
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = protox::compile(["proto/agent.proto", "proto/controller.proto", "proto/launcher.proto"], ["proto"])?;
    tonic_prost_build::configure().bytes(".").compile_fds(files)?;
    println!("cargo:rerun-if-changed=proto");
    Ok(())
}

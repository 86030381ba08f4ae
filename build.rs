//! Generates the protobuf types of `proto/`; maps are sorted, so that equal models have equal bytes.
#![expect(clippy::print_stdout, reason = "how a build script talks to cargo")]

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    let files = protox::compile(["proto/model.proto"], ["proto"])?;
    prost_build::Config::new().btree_map(["."]).include_file("proto.rs").compile_fds(files)?;
    Ok(())
}

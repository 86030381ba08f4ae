//! Generates the protobuf types of `proto/`, with sorted maps so that equal models have equal bytes, and a
//! table of every message's fields.

use std::{collections::BTreeMap, env, error::Error, fmt::Write, fs, path::Path};

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=proto");
    let files = protox::compile(["proto/model.proto"], ["proto"])?;
    // Message → field number → the message that the field holds, empty for a plain value.
    let mut messages: BTreeMap<String, BTreeMap<i32, String>> = BTreeMap::new();
    for file in &files.file {
        let mut open: Vec<_> =
            file.message_type.iter().map(|m| (format!(".{}.{}", file.package(), m.name()), m)).collect();
        while let Some((name, message)) = open.pop() {
            open.extend(message.nested_type.iter().map(|m| (format!("{name}.{}", m.name()), m)));
            let fields = message.field.iter().map(|f| (f.number(), f.type_name().to_string()));
            messages.insert(name, fields.collect());
        }
    }
    let mut table = String::from("&[\n");
    for (name, fields) in &messages {
        let fields: Vec<String> = fields
            .iter()
            .map(|(number, holds)| format!("({number}, {:?})", messages.keys().position(|m| m == holds)))
            .collect();
        let name = name.rsplit('.').next().unwrap_or(name);
        writeln!(table, "    ({name:?}, &[{}]),", fields.join(", "))?;
    }
    table.push_str("]\n");
    fs::write(Path::new(&env::var("OUT_DIR")?).join("fields.rs"), table)?;
    prost_build::Config::new().btree_map(["."]).include_file("proto.rs").compile_fds(files)?;
    Ok(())
}

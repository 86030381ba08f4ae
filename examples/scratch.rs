use silane::{checkpoint::*, graph, mil::DType, models, ops::Opset, passes};
fn main() {
    for dir in std::env::args().skip(1) {
        let c = Checkpoint::open(&dir).unwrap();
        let plan = models::Plan {
            task: c.task().unwrap(),
            batch: 2,
            tokens: Some(9),
            token_type_ids: false,
            float: DType::F16,
            opset: Opset::Ios18,
        };
        let mt = c.config.model_type().unwrap().to_string();
        match models::build(&c, &plan, &mt) {
            Ok(mut p) => {
                passes::tidy(&mut p.program).unwrap();
                let f = &p.program.functions["main"];
                let n = f.body.ops.iter().filter(|o| o.kind != "const").count();
                let t = f.body.ops.iter().filter(|o| o.kind == "transpose").count();
                println!("{dir}: {n} ops, {} consts, {t} transposes", f.body.ops.len() - n);
                let _ = graph::check(p.program).map_err(|e| println!("{e}"));
            }
            Err(e) => println!("{dir}: {e}"),
        }
    }
}

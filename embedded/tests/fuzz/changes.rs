//! Cases of JSON, changed at random in a way that keeps them JSON.

use serde_json::{Value, json};

/// Random numbers that are the same every time.
pub struct Dice(pub u64);

impl Dice {
    /// Less than this.
    pub fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % n.max(1) as u64).unwrap()
    }
}

fn places(value: &Value, at: &str, out: &mut Vec<String>) {
    out.push(at.to_owned());
    match value {
        Value::Object(map) => {
            for (key, v) in map {
                places(v, &format!("{at}/{}", key.replace('~', "~0").replace('/', "~1")), out);
            }
        }
        Value::Array(list) => list.iter().enumerate().for_each(|(i, v)| places(v, &format!("{at}/{i}"), out)),
        _ => {}
    }
}

/// Changes one place of a case: what stands there goes, becomes something else, or what stands elsewhere, or is there twice.
pub fn change(case: &mut Value, dice: &mut Dice) {
    let mut all = Vec::new();
    places(case, "", &mut all);
    let (to, from) = (all[dice.below(all.len())].clone(), all[dice.below(all.len())].clone());
    let other = case.pointer(&from).cloned().unwrap_or_default();
    let plain = [
        json!(null),
        json!({}),
        json!([]),
        json!(""),
        json!("x"),
        json!(0),
        json!(-1.5),
        json!(true),
        json!([[]]),
        json!({"$patch": "delete"}),
    ];
    let Some(there) = case.pointer_mut(&to) else { return };
    match (dice.below(5), there) {
        (0, Value::Object(map)) => {
            let key = map.keys().nth(dice.below(map.len())).cloned().unwrap_or_default();
            map.remove(&key);
        }
        (0, Value::Array(list)) if !list.is_empty() => drop(list.remove(dice.below(list.len()))),
        (1, Value::Array(list)) => list.push(other),
        (1, Value::Object(map)) => {
            let key = ["name", "$patch", "$retainKeys", "$setElementOrder/tags", "managedFields", "any", "k:x", "~/"]
                [dice.below(8)];
            map.insert(key.into(), other);
        }
        (2, there) => *there = other,
        (_, there) => *there = plain[dice.below(plain.len())].clone(),
    }
}

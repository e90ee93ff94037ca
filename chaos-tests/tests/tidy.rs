//! What no file may contain, and that it is noticed.

use chaos_tests::rules::{
    root,
    tidy::{self, File},
};

#[test]
fn the_repository_is_tidy() {
    let root = root();
    let exists = |path: &str| root.join(path).exists();
    let wrong: Vec<String> = tidy::files().unwrap().iter().flat_map(|file| tidy::violations(file, &exists)).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn what_is_untidy_is_noticed() {
    let exists = |path: &str| path == "docs/there.md" || path == "top.md";
    let count =
        |path: &str, text: &str| tidy::violations(&File { path: path.into(), text: text.into() }, &exists).len();
    assert_eq!(count("a.rs", "fn f() {\n    to_do!()\n}\n".replace("to_do", "todo").as_str()), 1);
    assert_eq!(count("a.sh", &["curl https://py", "pi.org/simple"].concat()), 1);
    assert_eq!(count("a.md", &["see /wo", "rk/main/x"].concat()), 1);
    assert_eq!(count("a.rs", &"let x = 1;\n".repeat(901)), 1);
    assert_eq!(count("a.rs", &"let x = 1;\n".repeat(900)), 0);
    assert_eq!(count("docs/a.md", "[fine](there.md) [up](../top.md#part) [out](https://example.org) [in](#part)"), 0);
    assert_eq!(count("docs/a.md", "[lost](gone.md)"), 1);
    assert_eq!(count("docs/a.md", "```\n[lost](gone.md)\n```\n"), 0);
}

#[test]
fn every_improvement_that_is_claimed_has_its_test() {
    let files = tidy::files().unwrap();
    let page = files.iter().find(|file| file.path == "docs/improvements.md").unwrap();
    let wrong = tidy::rows_without_test(&page.text, &files);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    let head = "| id | test |\n|---|---|\n";
    let one = |row: &str| tidy::rows_without_test(&format!("{head}{row}\n"), &files).len();
    assert_eq!(one("| a | `chaos-tests` `tidy::what_is_untidy_is_noticed` |"), 0);
    assert_eq!(one("| a | `state` `vm::a_test_that_nobody_wrote` |"), 1);
    assert_eq!(one("| a | later |"), 1);
    assert!(page.text.lines().filter(|line| line.starts_with("| RE-")).count() > 5);
}

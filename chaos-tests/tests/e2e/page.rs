//! The page of `virtfold up` in a real browser: content, keyboard, live changes, console; and `virtfold top` beside it.
//!
//! `UPDATE=1` writes the pictures into docs/screens; each run takes them.

use super::e2e;
use anyhow::{Context, Result, ensure};
use chaos_tests::{
    e2e::{
        browser::{self, Browser},
        cluster::{Cluster, Options, virtfold},
        manifest::{longest, vm},
        vm::{START, Vm},
        wait,
    },
    rules::root,
};
use serde_json::Value;
use std::{
    fs,
    io::{Read, Write},
    path::PathBuf,
    process::{Command, Stdio},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

/// For something to be shown after it has happened.
const SHOWN: Duration = Duration::from_secs(30);

/// Where pictures go.
fn pictures() -> Result<PathBuf> {
    let place = if std::env::var_os("UPDATE").is_some() { "docs/screens" } else { "target/screens" };
    let folder = root().join(place);
    fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
    Ok(folder)
}

/// A picture of what is shown.
fn picture(browser: &Browser, name: &str) -> Result<()> {
    let file = pictures()?.join(format!("{name}.png"));
    browser.picture(&file)?;
    let size = fs::metadata(&file)?.len();
    ensure!((4_000..400_000).contains(&size), "{} has {size} bytes", file.display());
    Ok(())
}

/// What has the focus: its id, or its text.
fn focused(browser: &Browser) -> Result<String> {
    browser.text("(e => e.id || e.getAttribute('href') || e.textContent)(document.activeElement)")
}

/// Presses Tab until something has the focus; all on the way must show that they have it.
fn tab_to(browser: &Browser, wanted: &str) -> Result<Vec<String>> {
    let mut seen = vec![];
    for _ in 0..40 {
        browser.press("Tab", false)?;
        let now = focused(browser)?;
        let outlined = "(s => s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) >= 2)(getComputedStyle(document.activeElement))";
        ensure!(browser.value(outlined)? == true, "{now} does not show that it has the focus");
        seen.push(now.clone());
        if now == wanted {
            return Ok(seen);
        }
    }
    anyhow::bail!("Tab does not come to {wanted}: {seen:?}")
}

/// Everything that can be operated has a name.
fn named(browser: &Browser) -> Result<usize> {
    let all = browser.operable()?;
    let nameless: Vec<_> = all.iter().filter(|(_, name)| name.trim().is_empty()).collect();
    ensure!(nameless.is_empty(), "{nameless:?} in {}", browser.text("location.pathname")?);
    Ok(all.len())
}

/// Status of a machine in the list.
fn status(name: &str) -> String {
    format!("document.getElementById('m-default-{name}')?.dataset.status")
}

/// The list: content, keyboard, no scripts, narrow and dark.
fn list(browser: &Browser, home: &str) -> Result<()> {
    browser.wait(&format!("{} === 'Running'", status("shop")), SHOWN)?;
    browser.wait(&format!("{}?.startsWith('Error')", status("ledger")), SHOWN)?;
    browser.wait(&format!("{} === 'Stopped'", status("archive")), SHOWN)?;
    let row = |name: &str| format!("document.getElementById('m-default-{name}').innerText");
    browser.wait(&format!("/of 128 MiB/.test({0}) && /[0-9.]+ of 1/.test({0})", row("shop")), SHOWN)?;
    browser.wait(&format!("{}.includes('Unschedulable')", row("ledger")), SHOWN)?;
    ensure!(browser.value("document.querySelectorAll('#m-default-shop .strip rect').length")?.as_u64() > Some(1));
    ensure!(named(browser)? >= 8);
    // What needs somebody comes first, in the order of the focus, too.
    let first = browser.text("document.querySelector('tbody tr').dataset.name")?;
    ensure!(first == "ledger", "{first}");
    let way = tab_to(browser, "a-m-default-shop")?;
    ensure!(
        way[0] == "#main" && way.iter().position(|w| w == "q") < way.iter().position(|w| w.contains("ledger")),
        "{way:?}"
    );
    let skipped = "document.querySelector('.skip').getBoundingClientRect().top < 0";
    ensure!(browser.value(skipped)? == true, "the skip link hides when it is left");
    picture(browser, "machines")?;
    browser.look(1280, 640, true)?;
    picture(browser, "machines-dark")?;
    browser.look(390, 844, false)?;
    let wide = "document.documentElement.scrollWidth <= document.documentElement.clientWidth";
    ensure!(browser.value(wide)? == true, "the list is wider than a narrow screen");
    picture(browser, "machines-narrow")?;
    browser.look(1280, 640, false)?;
    // Enter follows the link that has the focus.
    browser.value("document.getElementById('main').focus()")?;
    tab_to(browser, "a-m-default-shop")?;
    browser.press("Enter", false)?;
    browser.wait("location.pathname === '/machines/default/shop'", SHOWN)?;
    browser.open(&format!("{home}?q=arch"))?;
    ensure!(browser.value("document.querySelectorAll('tbody tr').length")? == 1, "the filter");
    browser.scripts(false)?;
    browser.open(&format!("{home}?q="))?;
    let refreshes = browser.value("document.querySelector('meta[http-equiv=refresh]') !== null")?;
    ensure!(
        refreshes == true && browser.value("document.querySelectorAll('tbody tr').length")? == 3,
        "without scripts"
    );
    browser.scripts(true)
}

/// A name of 253 characters with all that may be in one is shown, followed and typed into addresses, and breaks no layout.
fn longest_name(cluster: &Cluster, browser: &Browser, home: &str) -> Result<()> {
    let long = Vm::apply(cluster, &longest().run("Halted"))?;
    let name = &long.name;
    let narrow = "document.documentElement.scrollWidth <= document.documentElement.clientWidth";
    browser.look(390, 844, false)?;
    browser.open(home)?;
    browser.wait(&format!("{} === 'Stopped'", status(name)), SHOWN)?;
    ensure!(browser.value(narrow)? == true, "the list is wider than the screen");
    browser.value(&format!("document.getElementById('a-m-default-{name}').click()"))?;
    browser.wait(&format!("document.querySelector('h1')?.textContent === '{name}'"), SHOWN)?;
    ensure!(browser.value(narrow)? == true, "the machine is wider than the screen");
    browser.open(&format!("{home}machines/default/{name}/console"))?;
    browser.wait("document.getElementById('console-state').textContent.startsWith('Closed: ')", SHOWN)?;
    ensure!(browser.value(narrow)? == true, "the console is wider than the screen");
    browser.look(1280, 640, false)?;
    browser.open(home)?;
    browser.wait(&format!("{} === 'Stopped'", status(name)), SHOWN)?;
    cluster.ok(&["delete", "vm", name])?;
    browser.wait(&format!("{} === undefined", status(name)), SHOWN)?;
    browser.wait(&format!("document.getElementById('news').textContent === '{name} is gone'"), SHOWN)
}

/// The words of `virtfold explain` are those of the page.
fn explained(cluster: &Cluster, browser: &Browser, home: &str, name: &str) -> Result<()> {
    browser.open(&format!("{home}machines/default/{name}"))?;
    wait::until("the same words", SHOWN, || {
        let (code, out, error) = cluster.virtfold(&["explain", name, "-o", "json"])?;
        ensure!(code == 0, "{out}{error}");
        let why: Value = serde_json::from_str(&out)?;
        let why = if why.is_array() { why[0].clone() } else { why };
        let shown = browser.text("document.getElementById('main').innerText")?;
        let text = |v: &Value| v.as_str().unwrap_or_default().to_owned();
        let mut words = vec![text(&why["summary"])];
        for wait in why["waits"].as_array().into_iter().flatten() {
            words.extend([text(&wait["waitsFor"]), text(&wait["message"]), text(&wait["unblock"])]);
        }
        words.extend(why["steps"].as_array().into_iter().flatten().map(|s| text(&s["step"])));
        words.extend(why["history"].as_array().into_iter().flatten().map(|h| text(&h["message"])));
        let missing: Vec<_> = words.iter().filter(|w| !shown.contains(w.as_str())).collect();
        Ok(if missing.is_empty() { Ok(()) } else { Err(format!("{missing:?} of {shown}")) })
    })?;
    named(browser)?;
    Ok(())
}

/// The trace of a start as a waterfall: from the write to the guest, of all processes, and as narrow as a phone.
fn traced(browser: &Browser) -> Result<()> {
    let row = |name: &str, by: &str| {
        format!(
            "[...document.querySelectorAll('.trace tr')].some(r => r.cells[0].innerText === '{name}' && r.cells[1].textContent === '{by}')"
        )
    };
    for (name, by) in [
        ("write", "controller"),
        ("start", "controller"),
        ("create-vmi", "controller"),
        ("boot", "controller"),
        ("prepare-network", "node-agent, node-1"),
        ("launch", "launcher, node-1"),
        ("guest-boot", "launcher, node-1"),
        ("guest-agent", "controller"),
    ] {
        browser.wait(&row(name, by), SHOWN)?;
    }
    // Where all of the steps are in the trace, they are not shown a second time.
    browser.wait("document.getElementById('steps') === null", SHOWN)?;
    browser.look(390, 844, false)?;
    let narrow = "document.documentElement.scrollWidth <= document.documentElement.clientWidth";
    ensure!(browser.value(narrow)? == true, "the trace is wider than a narrow screen");
    browser.look(1280, 900, false)
}

/// A console: what is typed comes to the guest, what it says is shown.
fn console(browser: &Browser) -> Result<()> {
    browser.wait("document.getElementById('console-state').textContent === 'Connected'", SHOWN)?;
    ensure!(focused(browser)? == "line", "the line has the focus");
    named(browser)?;
    let screen = "document.getElementById('screen').textContent";
    // As on a terminal: Enter brings the prompt of the login, or of a shell that somebody left.
    let mut typed = "";
    wait::until("a shell", START, || {
        browser.write(typed)?;
        browser.press("Enter", false)?;
        let last = format!("{screen}.trimEnd().split('\\n').at(-1)");
        browser.wait(&format!("/(login:|#)$/.test({last})"), Duration::from_secs(3))?;
        let prompt = browser.text(&last)?;
        typed = if prompt.ends_with("login:") { "root" } else { "" };
        Ok(if prompt.ends_with('#') { Ok(()) } else { Err(prompt) })
    })?;
    browser.write("echo read-$((6*7))")?;
    browser.press("Enter", false)?;
    browser.wait(&format!("{screen}.includes('read-42')"), SHOWN)?;
    // Each key as it is typed, and Tab leaves nevertheless.
    browser.value("document.getElementById('each').click(), document.getElementById('line').focus()")?;
    for key in ["Enter", "Tab"] {
        browser.press(key, false)?;
    }
    ensure!(focused(browser)? == "send", "Tab leaves the field");
    picture(browser, "console")
}

/// What `top` says of the same machines, in a table and as JSON.
fn top(cluster: &Cluster) -> Result<()> {
    wait::until("figures of a running machine", SHOWN, || {
        let (code, out, error) = cluster.virtfold(&["top", "-o", "json"])?;
        ensure!(code == 0, "{out}{error}");
        let all: Value = serde_json::from_str(&out)?;
        let of = |name: &str| {
            all[0].as_array().or(all.as_array()).into_iter().flatten().find(|m| m["name"] == name).cloned()
        };
        let shop = of("shop").context("shop")?;
        let usage = &shop["usage"];
        let seen =
            usage["cpu"].as_f64().is_some_and(|c| (0.0..64.0).contains(&c)) && usage["memoryTotalBytes"] == 128 << 20;
        ensure!(of("archive").is_some_and(|m| m["usage"].is_null()), "what does not run uses nothing: {all}");
        Ok(if seen && shop["phase"] == "Running" { Ok(()) } else { Err(shop.to_string()) })
    })?;
    let (code, out, error) = cluster.virtfold(&["top", "--sort", "memory"])?;
    let lines: Vec<&str> = out.lines().collect();
    ensure!(
        code == 0 && lines.len() == 4 && lines[0].starts_with("NAME ") && lines[1].starts_with("shop "),
        "{out}{error}"
    );
    ensure!(!out.contains('\x1b'), "no colours where there is no terminal");
    let ledger = lines.iter().find(|l| l.starts_with("ledger ")).context("ledger")?;
    ensure!(ledger.contains("Unschedulable: "), "{ledger}");
    let (code, out, error) = cluster.virtfold(&["top", "nodes", "-o", "wide"])?;
    let node = out.lines().nth(1).unwrap_or_default();
    ensure!(
        code == 0 && node.starts_with("node-1 ") && node.contains("Ready") && node.contains(" GiB"),
        "{out}{error}"
    );
    let (code, _, error) = cluster.virtfold(&["top", "pods"])?;
    ensure!(code == 2 && error.contains("vms"), "{code} {error}");
    Ok(())
}

/// In a terminal it draws, sorts, and leaves the terminal as it was.
fn top_in_a_terminal(cluster: &Cluster) -> Result<()> {
    let size = nix::pty::Winsize { ws_row: 12, ws_col: 100, ws_xpixel: 0, ws_ypixel: 0 };
    let pty = nix::pty::openpty(Some(&size), None)?;
    let before = nix::sys::termios::tcgetattr(&pty.slave)?;
    let slave = || pty.slave.try_clone().map(Stdio::from);
    let mut child = Command::new(virtfold()?)
        .args(["top", "--interval", "1"])
        .env("KUBECONFIG", cluster.kubeconfig())
        .env_remove("NO_COLOR")
        .stdin(slave()?)
        .stdout(slave()?)
        .stderr(slave()?)
        .spawn()?;
    let mut keyboard = fs::File::from(pty.master.try_clone()?);
    let mut screen = fs::File::from(pty.master);
    let seen = Arc::new(Mutex::new(String::new()));
    let shown = seen.clone();
    std::thread::spawn(move || {
        let mut buffer = [0; 4096];
        while let Ok(count @ 1..) = screen.read(&mut buffer) {
            shown.lock().unwrap().push_str(&String::from_utf8_lossy(&buffer[..count]));
        }
    });
    let until = |what: &str| {
        wait::until(what, SHOWN, || {
            let seen = seen.lock().unwrap();
            Ok(if seen.contains(what) { Ok(()) } else { Err(seen.clone()) })
        })
    };
    until("\x1b[?1049h")?;
    until("3 machines in namespace default, by name, every 1 s")?;
    // A second look brings figures; colours are there.
    wait::until("figures", SHOWN, || {
        let seen = seen.lock().unwrap();
        let shop = seen.lines().rfind(|l| l.starts_with("shop ")).unwrap_or_default();
        Ok(if shop.contains("/1 ") && !shop.contains("?/1") && shop.contains("\x1b[32mRunning") {
            Ok(())
        } else {
            Err(shop.to_owned())
        })
    })?;
    keyboard.write_all(b"m")?;
    until("by memory, every 1 s")?;
    keyboard.write_all(b"o")?;
    until("1 nodes, by memory")?;
    keyboard.write_all(b"q")?;
    let code = wait::until("the end", SHOWN, || Ok(child.try_wait()?.ok_or_else(|| "it runs".to_owned())))?;
    ensure!(code.success(), "{code}");
    until("\x1b[?25h\x1b[?1049l")?;
    ensure!(nix::sys::termios::tcgetattr(&pty.slave)? == before, "the terminal is as it was");
    Ok(())
}

#[test]
fn a_browser_shows_machines_their_reasons_nodes_and_consoles() -> Result<()> {
    e2e!();
    if let Err(why) = browser::program() {
        println!("SKIPPED: {why}");
        return Ok(());
    }
    let _turn = super::TURN.read().unwrap_or_else(PoisonError::into_inner);
    let cluster = Cluster::start(Options { arguments: vec!["--stop-guests".into()], ..Options::default() })?;
    let url = fs::read_to_string(cluster.data.join("page.url"))?;
    let url = url.trim();
    let mode = std::os::unix::fs::PermissionsExt::mode(&fs::metadata(cluster.data.join("page.url"))?.permissions());
    ensure!(mode & 0o077 == 0, "{mode:o}");
    let home = url.split('?').next().context("an address")?.to_owned();

    let browser = Browser::start()?;
    browser.look(1280, 640, false)?;
    // Nobody sees anything without the token; then an empty cluster is shown.
    browser.open(&home)?;
    ensure!(browser.text("document.querySelector('h1').textContent")? == "Who are you?");
    browser.open(url)?;
    ensure!(browser.text("location.href")? == home, "the token is not in the address any more");
    browser.wait(
        "document.querySelector('.empty') !== null && document.getElementById('link').textContent === 'Live'",
        SHOWN,
    )?;

    // What comes from now on comes without reloading.
    browser.value("window.same = true")?;
    let shop = Vm::apply(&cluster, &vm("shop"))?;
    let mut stuck = vm("ledger");
    stuck.spec()["nodeSelector"] = serde_json::json!({"disk": "fast"});
    let _ledger = Vm::apply(&cluster, &stuck)?;
    let _archive = Vm::apply(&cluster, &vm("archive").run("Halted"))?;
    browser.wait(&format!("{} === 'Running'", status("shop")), START)?;
    ensure!(browser.value("window.same === true")? == true, "the document is the same");
    browser.wait("document.getElementById('news').textContent !== ''", SHOWN)?;
    shop.wait_condition("AgentConnected", "True", START)?;

    list(&browser, &home)?;
    longest_name(&cluster, &browser, &home)?;
    explained(&cluster, &browser, &home, "ledger")?;
    browser.look(1280, 900, false)?;
    picture(&browser, "explanation")?;
    explained(&cluster, &browser, &home, "shop")?;
    traced(&browser)?;
    picture(&browser, "machine")?;
    browser.open(&format!("{home}nodes"))?;
    browser.wait("/[0-9.]+ of [0-9]+/.test(document.getElementById('node-1').innerText)", SHOWN)?;
    ensure!(browser.value("document.querySelector('#node-1 .here a').textContent")? == "shop");
    named(&browser)?;
    browser.look(1280, 640, false)?;
    picture(&browser, "nodes")?;
    top(&cluster)?;
    top_in_a_terminal(&cluster)?;
    browser.open(&format!("{home}machines/default/shop/console"))?;
    console(&browser)?;

    // A guest that ends is seen to end, in the view of the machine itself.
    browser.open(&format!("{home}machines/default/shop"))?;
    browser.value("window.same = true")?;
    let (code, out, error) = cluster.virtfold(&["stop", "shop"])?;
    ensure!(code == 0, "{out}{error}");
    browser.wait("document.getElementById('head').dataset.status === 'Stopped'", START)?;
    ensure!(browser.value("window.same === true")? == true);
    browser.wait("document.getElementById('main').innerText.includes('asked for a stop') || document.getElementById('main').innerText.includes('changed the run strategy')", SHOWN)?;

    let (requests, errors) = browser.heard();
    let own = |r: &&String| {
        [home.as_str(), &home.replace("http", "ws")].iter().any(|own| r.starts_with(own)) || *r == "about:blank"
    };
    let elsewhere: Vec<_> = requests.iter().filter(|r| !own(r)).collect();
    ensure!(requests.len() > 20 && elsewhere.is_empty(), "{elsewhere:?} of {}", requests.len());
    // That somebody without a token is refused is told as an error.
    let errors: Vec<_> = errors.iter().filter(|e| !e.contains("401")).collect();
    ensure!(errors.is_empty(), "{errors:?}");
    Ok(())
}

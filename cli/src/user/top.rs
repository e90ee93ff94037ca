//! `virtfold top`: what machines and nodes use and wait for, once or again and again.

use std::io::{IsTerminal, Write};
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};
use tokio::io::AsyncReadExt;
use tokio::signal::unix::{SignalKind, signal};

use super::cluster::{Cluster, Kind, connect};
use super::console::Raw;
use super::output::{colour, cut, lines, print};
use crate::args::{self, Output, Sort, Tops};
use crate::machines::{self, Flow, Load, Machine, Meter, Node, age, bytes};

/// Between the two looks that a rate needs, where it is printed once.
const BETWEEN: Duration = Duration::from_secs(1);
/// An answer that takes longer is not waited for.
const PATIENCE: Duration = Duration::from_secs(15);
/// Another screen, without a cursor; and back.
const ENTER: &str = "\x1b[?1049h\x1b[?25l";
const LEAVE: &str = "\x1b[?25h\x1b[?1049l";
/// ctrl-C, where the terminal is raw.
const INTERRUPT: u8 = 3;

/// What was seen last.
#[derive(Default)]
struct Seen {
    machines: Vec<Machine>,
    nodes: Vec<Node>,
    meter: Meter,
    /// Why nothing newer is known, or not all.
    trouble: Vec<String>,
}

/// What is shown of it, and how.
struct View {
    what: Tops,
    everywhere: bool,
    namespace: String,
    sort: Sort,
    reverse: bool,
    wide: bool,
    /// Rows that are above the screen.
    above: usize,
    stopped: bool,
    interval: Duration,
}

/// `virtfold top`.
pub async fn run(options: args::Top) -> anyhow::Result<u8> {
    let cluster = connect(&options.target).await?;
    let mut view = View {
        what: options.what,
        everywhere: options.all_namespaces,
        namespace: cluster.namespace.clone(),
        sort: options.sort,
        reverse: options.reverse,
        wide: options.output == Some(Output::Wide),
        above: 0,
        stopped: false,
        interval: Duration::from_secs(options.interval),
    };
    let document = options.output.filter(|o| matches!(o, Output::Json | Output::Yaml));
    let mut seen = Seen::default();
    if options.once || document.is_some() || !std::io::stdout().is_terminal() {
        seen.look(&cluster, &view).await?;
        tokio::time::sleep(BETWEEN).await;
        seen.look(&cluster, &view).await?;
        once(&seen, &view, document)?;
        return Ok(0);
    }
    // Who may not ask, or asks nobody, is told so on an ordinary screen.
    seen.look(&cluster, &view).await?;
    live(&cluster, &mut view, seen).await?;
    Ok(0)
}

impl Seen {
    /// Looks; an error where the objects cannot be read. What they use may be missing.
    async fn look(&mut self, cluster: &Cluster, view: &View) -> anyhow::Result<()> {
        let (client, nodes) = (&cluster.client, view.what == Tops::Nodes);
        let namespace = (!view.everywhere && !nodes).then_some(view.namespace.as_str());
        let looked = async {
            let vms = machines::list(client, namespace, Kind::Vm.plural()).await?;
            let vmis = machines::list(client, namespace, Kind::Vmi.plural()).await?;
            let nodes = match nodes {
                true => machines::get(client, "/api/v1/nodes").await?.unwrap_or_default(),
                false => Value::Null,
            };
            let usage = machines::usage(client, namespace).await;
            anyhow::Ok((vms, vmis, nodes, usage))
        };
        let (vms, vmis, nodes, usage) = tokio::time::timeout(PATIENCE, looked)
            .await
            .unwrap_or_else(|_| anyhow::bail!("the API server did not answer within {} s", PATIENCE.as_secs()))?;
        self.machines = machines::machines(&vms, &vmis);
        self.nodes = machines::nodes(nodes["items"].as_array().map(Vec::as_slice).unwrap_or_default(), &self.machines);
        self.trouble = match usage {
            Ok(usage) => {
                self.meter.take(&usage);
                self.meter.gaps.clone()
            }
            Err(error) => {
                self.meter = Meter::default();
                vec![format!("what machines use is not known: {error:#}")]
            }
        };
        Ok(())
    }

    fn of(&self, machine: &Machine) -> Option<&Load> {
        self.meter.machines.get(&machine.key())
    }
}

/// A text of somebody else's, in one line and without anything that a terminal would obey.
fn tame(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

fn processors(load: Option<&Load>) -> String {
    match load {
        Some(Load { cpu: Some(cpu), cpus, .. }) => format!("{cpu:.2}/{cpus}"),
        Some(load) => format!("?/{}", load.cpus),
        None => "-".into(),
    }
}

fn memory(load: Option<&Load>) -> String {
    load.map_or("-".into(), machines::memory)
}

fn rate(flow: Option<Flow>) -> String {
    flow.map_or("-".into(), |f| format!("{}/s {}/s", bytes(f.bytes_in), bytes(f.bytes_out)))
}

/// What is sorted by; greater comes later. Numbers are turned around, so that the greatest comes first.
fn rank(sort: Sort, status: &str, load: Option<&Load>, created: Option<i64>) -> (String, i64) {
    let number = |n: f64| (String::new(), -(n * 1000.0) as i64);
    match sort {
        Sort::Name => (String::new(), 0),
        Sort::Status => (status.to_owned(), 0),
        Sort::Cpu => number(load.and_then(|l| l.cpu).unwrap_or(-1.0)),
        Sort::Memory => (String::new(), -load.and_then(|l| l.memory_bytes).map_or(-1, u64::cast_signed)),
        Sort::Age => (String::new(), created.unwrap_or(i64::MAX)),
    }
}

/// The machines in their order.
fn sorted_machines<'a>(seen: &'a Seen, view: &View) -> Vec<&'a Machine> {
    let mut all: Vec<&Machine> = seen.machines.iter().collect();
    all.sort_by_cached_key(|m| (rank(view.sort, &m.status, seen.of(m), m.created), m.key()));
    if view.reverse {
        all.reverse();
    }
    all
}

fn sorted_nodes<'a>(seen: &'a Seen, view: &View) -> Vec<&'a Node> {
    let mut all: Vec<&Node> = seen.nodes.iter().collect();
    all.sort_by_cached_key(|n| (rank(view.sort, &n.status, seen.meter.nodes.get(&n.name), n.created), n.name.clone()));
    if view.reverse {
        all.reverse();
    }
    all
}

/// The table: its head and its rows.
fn table(seen: &Seen, view: &View, now: i64) -> (Vec<&'static str>, Vec<Vec<String>>) {
    let since = |created: Option<i64>| created.map(|t| age(now - t)).unwrap_or_default();
    match view.what {
        Tops::Vms => {
            let mut head = vec!["NAME", "STATUS", "PHASE", "CPU", "MEMORY", "NODE", "AGE", "WAITS FOR"];
            if view.wide {
                head.splice(7..7, ["DISK (R, W)", "NETWORK (IN, OUT)", "ADDRESS", "SYSTEM"]);
            }
            if view.everywhere {
                head.insert(0, "NAMESPACE");
            }
            let row = |m: &&Machine| {
                let load = seen.of(m);
                let mut row =
                    vec![tame(&m.name), colour(&tame(&m.status)), tame(&m.phase), processors(load), memory(load)];
                row.extend([tame(&m.node), since(m.created)]);
                if view.wide {
                    row.extend([rate(load.and_then(|l| l.disk)), rate(load.and_then(|l| l.network))]);
                    row.extend([tame(&m.address), tame(&m.system)]);
                }
                row.push(tame(&m.waits_for));
                if view.everywhere {
                    row.insert(0, tame(&m.namespace));
                }
                row
            };
            (head, sorted_machines(seen, view).iter().map(row).collect())
        }
        Tops::Nodes => {
            let mut head = vec!["NAME", "STATUS", "MACHINES", "CPU", "MEMORY", "OF MACHINES", "LOAD", "AGE"];
            if view.wide {
                head.extend(["FOR PODS", "GUESTS"]);
            }
            let row = |n: &&Node| {
                let load = seen.meter.nodes.get(&n.name);
                let said = |f: &dyn Fn(&Load) -> String| load.map_or("-".to_owned(), f);
                let three = |l: &Load| l.load.iter().map(|n| format!("{n:.2}")).collect::<Vec<_>>().join(" ");
                let mut row = vec![tame(&n.name), colour(&tame(&n.status)), n.machines.to_string(), processors(load)];
                row.extend([memory(load), said(&|l| bytes(l.resident_bytes as f64)), said(&three), since(n.created)]);
                if view.wide {
                    row.push(tame(&format!("{} CPUs, {}", n.allocatable_cpu, n.allocatable_memory)));
                    row.push(if n.kvm { "kvm" } else { "emulated" }.into());
                }
                row
            };
            (head, sorted_nodes(seen, view).iter().map(row).collect())
        }
    }
}

fn now() -> i64 {
    Timestamp::now().as_second()
}

/// Prints it once.
fn once(seen: &Seen, view: &View, document: Option<Output>) -> anyhow::Result<()> {
    for trouble in &seen.trouble {
        eprintln!("virtfold: {}", tame(trouble));
    }
    if let Some(output) = document {
        let with = |mut object: Value, load: Option<&Load>| -> anyhow::Result<Value> {
            object["usage"] = load.map_or(Ok(Value::Null), serde_json::to_value)?;
            Ok(object)
        };
        let all: anyhow::Result<Vec<Value>> = match view.what {
            Tops::Vms => sorted_machines(seen, view).iter().map(|m| with(json!(m), seen.of(m))).collect(),
            Tops::Nodes => {
                sorted_nodes(seen, view).iter().map(|n| with(json!(n), seen.meter.nodes.get(&n.name))).collect()
            }
        };
        return print(&[all?.into()], output);
    }
    let (head, rows) = table(seen, view, now());
    if rows.is_empty() {
        eprintln!("{}", nothing(view));
        return Ok(());
    }
    Ok(super::output::table(&head, &rows)?)
}

fn nothing(view: &View) -> String {
    match view.what {
        Tops::Nodes => "No nodes.".into(),
        Tops::Vms if view.everywhere => "No virtual machines.".into(),
        Tops::Vms => format!("No virtual machines in namespace {}.", view.namespace),
    }
}

/// The terminal's other screen, until this is dropped.
struct Screen {
    _raw: Raw,
    colours: bool,
}

impl Screen {
    fn enter() -> Self {
        let raw = Raw::new();
        print!("{ENTER}");
        Self { _raw: raw, colours: std::env::var_os("NO_COLOR").is_none() }
    }

    fn draw(&self, all: &[String]) -> std::io::Result<()> {
        let mut out = std::io::stdout().lock();
        // Over what is there, line by line: a screen that is emptied first flickers.
        write!(out, "\x1b[H")?;
        for (i, line) in all.iter().enumerate() {
            let next = if i > 0 { "\r\n" } else { "" };
            write!(out, "{next}{line}\x1b[0m\x1b[K")?;
        }
        write!(out, "\x1b[J")?;
        out.flush()
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        print!("{LEAVE}");
        let _ = std::io::stdout().flush();
    }
}

/// Columns and rows of the terminal.
fn size() -> (usize, usize) {
    match rustix::termios::tcgetwinsize(std::io::stdout()) {
        Ok(size) if size.ws_col > 0 && size.ws_row > 0 => (size.ws_col.into(), size.ws_row.into()),
        _ => (80, 24),
    }
}

/// The whole screen; the view's scrolling is put right where it went too far.
fn screen(seen: &Seen, view: &mut View, now: i64, (columns, rows): (usize, usize), colours: bool) -> Vec<String> {
    let paint = |code: u8, text: &str| if colours { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() };
    let (head, body) = table(seen, view, now);
    let count = body.len();
    let mut all = lines(&head, &body);
    let place = match view.what {
        Tops::Nodes => "nodes".to_owned(),
        Tops::Vms if view.everywhere => "machines of all namespaces".into(),
        Tops::Vms => format!("machines in namespace {}", view.namespace),
    };
    let order = if view.reverse { ", reversed" } else { "" };
    let sort = match view.sort {
        Sort::Name => "name",
        Sort::Status => "status",
        Sort::Cpu => "CPU",
        Sort::Memory => "memory",
        Sort::Age => "age",
    };
    let state = if view.stopped { "stopped".to_owned() } else { format!("every {} s", view.interval.as_secs()) };
    let mut out = vec![paint(1, &cut(&format!("{count} {place}, by {sort}{order}, {state}"), columns))];
    out.extend(seen.trouble.iter().take(3).map(|t| paint(31, &cut(&tame(t), columns))));
    out.push(String::new());
    if count == 0 {
        out.push(cut(&nothing(view), columns));
        all.clear();
    }
    let room = rows.saturating_sub(out.len() + 2).max(1);
    view.above = view.above.min(count.saturating_sub(room));
    if !all.is_empty() {
        let head = all.remove(0);
        out.push(paint(2, &cut(&head, columns)));
    }
    out.extend(all.iter().skip(view.above).take(room).map(|line| cut(line, columns)));
    while out.len() + 1 < rows {
        out.push(String::new());
    }
    out.truncate(rows.saturating_sub(1).max(1));
    out.push(paint(
        2,
        &cut("q quit  ↑↓ scroll  sort by n s c m a  r reverse  o nodes/machines  w wide  space stop", columns),
    ));
    out
}

/// What a key asks for.
#[derive(Debug, PartialEq, Eq)]
enum Asked {
    /// To end.
    Quit,
    /// To look at once.
    Look,
    /// To show what is known in another way.
    Draw,
}

/// Takes what was typed.
fn typed(keys: &[u8], view: &mut View, rows: usize) -> Asked {
    let page = rows.saturating_sub(4).max(1);
    let mut asked = Asked::Draw;
    let mut rest = keys;
    while let Some(key) = rest.first() {
        let (taken, up, down) = match rest {
            [0x1b, b'[' | b'O', b'A', ..] => (3, 1, 0),
            [0x1b, b'[' | b'O', b'B', ..] => (3, 0, 1),
            [0x1b, b'[', b'5', b'~', ..] => (4, page, 0),
            [0x1b, b'[', b'6', b'~', ..] => (4, 0, page),
            [0x1b, b'[' | b'O', b'H', ..] => (3, usize::MAX, 0),
            [0x1b, b'[' | b'O', b'F', ..] => (3, 0, usize::MAX >> 1),
            [b'k', ..] => (1, 1, 0),
            [b'j', ..] => (1, 0, 1),
            // A sequence that means nothing here.
            [0x1b, b'[', ..] => (rest.len(), 0, 0),
            _ => (1, 0, 0),
        };
        view.above = view.above.saturating_sub(up).saturating_add(down);
        let sort = match key {
            b'q' | b'Q' | &INTERRUPT => return Asked::Quit,
            b'n' => Some(Sort::Name),
            b's' => Some(Sort::Status),
            b'c' => Some(Sort::Cpu),
            b'm' => Some(Sort::Memory),
            b'a' => Some(Sort::Age),
            _ => None,
        };
        match key {
            b'r' => view.reverse = !view.reverse,
            b'w' => view.wide = !view.wide,
            b' ' => view.stopped = !view.stopped,
            b'o' => {
                view.what = if view.what == Tops::Vms { Tops::Nodes } else { Tops::Vms };
                view.above = 0;
                asked = Asked::Look;
            }
            _ => {}
        }
        view.sort = sort.unwrap_or(view.sort);
        rest = rest.get(taken..).unwrap_or_default();
    }
    asked
}

/// Looks and draws until somebody quits.
async fn live(cluster: &Cluster, view: &mut View, mut seen: Seen) -> anyhow::Result<()> {
    let mut resized = signal(SignalKind::window_change())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut hung_up = signal(SignalKind::hangup())?;
    let mut input = tokio::io::stdin();
    let mut keys = [0; 64];
    let mut ticks = tokio::time::interval(view.interval);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let screen_of_terminal = Screen::enter();
    loop {
        screen_of_terminal.draw(&screen(&seen, view, now(), size(), screen_of_terminal.colours))?;
        let asked = tokio::select! {
            read = input.read(&mut keys) => match read? {
                0 => Asked::Quit,
                count => typed(keys.get(..count).unwrap_or_default(), view, size().1),
            },
            _ = resized.recv() => Asked::Draw,
            _ = terminate.recv() => Asked::Quit,
            _ = hung_up.recv() => Asked::Quit,
            _ = ticks.tick(), if !view.stopped => Asked::Look,
        };
        match asked {
            Asked::Quit => return Ok(()),
            Asked::Draw => {}
            Asked::Look => {
                if let Err(error) = seen.look(cluster, view).await {
                    seen.trouble = vec![format!("{error:#}; this is what was seen last")];
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn view() -> View {
        View {
            what: Tops::Vms,
            everywhere: false,
            namespace: "default".into(),
            sort: Sort::Name,
            reverse: false,
            wide: false,
            above: 0,
            stopped: false,
            interval: Duration::from_secs(2),
        }
    }

    fn seen() -> Seen {
        let machine = |name: &str, status: &str, created: i64| Machine {
            namespace: "default".into(),
            name: name.into(),
            status: status.into(),
            phase: "Running".into(),
            node: "node-1".into(),
            created: Some(created),
            ..Machine::default()
        };
        let mut seen =
            Seen { machines: vec![machine("a", "Running", 0), machine("b", "Paused", 40)], ..Seen::default() };
        seen.machines[1].waits_for = "Paused:\x1b[2J\nfor ever".into();
        for (name, cpu) in [("a", 0.25), ("b", 1.5)] {
            let load = Load {
                cpu: Some(cpu),
                cpus: 2,
                memory_bytes: Some(1 << 20),
                memory_total_bytes: 1 << 27,
                ..Load::default()
            };
            seen.meter.machines.insert(("default".into(), name.into()), load);
        }
        seen
    }

    #[test]
    fn a_screen_fits_and_obeys_nobody() {
        let (seen, mut view) = (seen(), view());
        let all = screen(&seen, &mut view, 100, (120, 10), false);
        assert_eq!(all.len(), 10);
        assert_eq!(all[0], "2 machines in namespace default, by name, every 2 s");
        assert_eq!(all[2], "NAME   STATUS    PHASE     CPU      MEMORY               NODE     AGE    WAITS FOR");
        assert_eq!(all[3], "a      Running   Running   0.25/2   1.0 MiB of 128 MiB   node-1   100s");
        assert_eq!(
            all[4],
            "b      Paused    Running   1.50/2   1.0 MiB of 128 MiB   node-1   60s    Paused: [2J for ever"
        );
        for (columns, rows) in [(10, 4), (1, 1), (300, 3)] {
            let all = screen(&seen, &mut view, 100, (columns, rows), false);
            assert!(all.len() <= rows.max(2) && all.iter().all(|l| l.chars().count() <= columns), "{all:?}");
        }
    }

    #[test]
    fn keys_sort_scroll_and_quit() {
        let (seen, mut view) = (seen(), view());
        assert_eq!(typed(b"c", &mut view, 24), Asked::Draw);
        assert_eq!(sorted_machines(&seen, &view)[0].name, "b", "the greatest first");
        assert_eq!(typed(b"ra", &mut view, 24), Asked::Draw);
        assert_eq!(sorted_machines(&seen, &view)[0].name, "b", "the youngest first, turned around");
        typed(b"\x1b[B\x1b[Bj\x1b[A", &mut view, 24);
        assert_eq!(view.above, 2);
        screen(&seen, &mut view, 0, (80, 24), false);
        assert_eq!(view.above, 0, "there is nothing below");
        assert_eq!(typed(b"o", &mut view, 24), Asked::Look);
        assert_eq!(view.what, Tops::Nodes);
        assert_eq!(typed(b"\x1b[99;5u", &mut view, 24), Asked::Draw);
        assert_eq!(typed(&[INTERRUPT], &mut view, 24), Asked::Quit);
        assert_eq!(typed(b"\x1b[F", &mut view, 24), Asked::Draw);
        screen(&seen, &mut view, 0, (80, 24), false);
    }

    #[test]
    fn what_is_not_known_is_not_made_up() {
        assert_eq!((processors(None), memory(None), rate(None)), ("-".into(), "-".into(), "-".into()));
        assert_eq!(processors(Some(&Load { cpus: 4, ..Load::default() })), "?/4");
        let mut view = view();
        view.what = Tops::Nodes;
        view.wide = true;
        let node = Node { name: "n".into(), status: "Ready".into(), machines: 3, ..Node::default() };
        let (head, rows) = table(&Seen { nodes: vec![node], ..Seen::default() }, &view, 0);
        assert_eq!(head.len(), rows[0].len());
        assert_eq!(rows[0][..7], ["n", "Ready", "3", "-", "-", "-", "-"]);
    }
}

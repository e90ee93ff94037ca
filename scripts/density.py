"""How the controller does under load, on a real kube-apiserver; for `scripts/bench --kubernetes`.

Two control planes, one after the other. On the first, the writes of one VM's start are taken from the audit log (those of the
controller, the kubelet and the node agent); the journal's cost is measured, on and off in turn; and a bare client does the same writes with
no controller and nobody else there: the floor. On the second, the controller and simulated nodes do it. Both in one run, so that their ratio
says something on any machine. The client is `virtfold-chaos load`: what puts the load must take little of a machine with few cores. Every
step has a limit, and what fails is told as a row. Nothing but the standard library is used.
"""

import collections
import contextlib
import http.client
import http.server
import json
import os
import re
import socket
import ssl
import statistics
import subprocess
import threading
import time

API = "/apis/kubevirt.io/v1/namespaces/{}/"
# As many requests at once as the controller has.
CLIENTS = 64
MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
CONTROLLER = "virtfold-controller"


class Failed(Exception):
    """A step of the bench did not come to its end."""


def vm():
    return {"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": {"name": "@name@"}, "spec": {
        "runStrategy": "Always", "template": {"metadata": {"labels": {"load": "density"}}, "spec": {
            "terminationGracePeriodSeconds": 0,
            "domain": {"resources": {"requests": {"memory": "90Mi", "cpu": "100m"}},
                       "devices": {"disks": [{"name": "containerdisk", "disk": {"bus": "virtio"}}],
                                   "interfaces": [{"name": "default", "masquerade": {}}]}},
            "networks": [{"name": "default", "pod": {}}],
            "volumes": [{"name": "containerdisk", "containerDisk": {"image": "registry.local/alpine:1"}}]}}}}


def step(method, path, body, kind="application/json", keep=None, user=None):
    return {"method": method, "path": path, "type": kind, "body": json.dumps(body), "keep": keep, "as": user}


def until(what, holds, limit=120):
    end = time.monotonic() + limit
    while not holds():
        if time.monotonic() > end:
            raise Failed(f"not within {limit} s: {what}")
        time.sleep(0.2)


class Process:
    """What a process has used. CPU in nanoseconds, by the process's own clock."""

    def __init__(self, pid):
        self.pid = pid

    def cpu(self):
        return time.clock_gettime((~self.pid << 3) | 2)

    def memory(self):
        """MiB: resident, most ever resident, of what is resident its own (not of files)."""
        with open(f"/proc/{self.pid}/status") as status:
            text = status.read()
        return tuple(int(re.search(key + r":\s+(\d+)", text)[1]) / 1024 for key in ("VmRSS", "VmHWM", "RssAnon"))


class Audit:
    """The calls in an audit log, read on from where it was read last."""

    def __init__(self, data):
        self.file, self.rest = open(os.path.join(data, "audit.log")), ""

    def new(self):
        text = self.rest + self.file.read()
        *lines, self.rest = text.split("\n")
        events = (json.loads(line) for line in lines if line)
        return [e for e in events if e["stage"] == ("ResponseStarted" if e["verb"] == "watch" else "ResponseComplete")]

    def counts(self, vms=1):
        """New calls of the controller: those that are writes, those refused, a table of all; but for its Lease and its watches."""
        wrote = refused = 0
        table = collections.Counter()
        for e in self.new():
            about = e.get("objectRef", {})
            if e["user"]["username"] != CONTROLLER or e["verb"] == "watch" or about.get("resource") == "leases":
                continue
            resource = about.get("resource", "-") + ("/" + about["subresource"] if "subresource" in about else "")
            bad = e["responseStatus"]["code"] >= 400
            table[(e["verb"], resource, str(e["responseStatus"]["code"]) if bad else "")] += 1
            if e["verb"] in ("create", "update", "patch", "delete"):
                wrote += 1
                refused += bad
        return wrote / vms, refused / vms, table


class Plane:
    """One control plane, and what runs at it."""

    def __init__(self, chaos, binary, lean):
        arguments = ["--lean"] if lean else []
        self.chaos, self.binary, self.children = chaos, binary, {}
        self.harness = subprocess.Popen([chaos, "kubernetes", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                        env={**os.environ, "VIRTFOLD": binary})
        line = self.harness.stdout.readline()
        if not line:
            raise Failed("the control plane of Kubernetes did not start")
        self.about = json.loads(line)
        self.data, self.pki = self.about["data"], os.path.join(self.about["data"], "pki")
        self.tls = ssl.create_default_context(cafile=os.path.join(self.pki, "ca.crt"))
        self.audit, self.connection = Audit(self.data), None

    def call(self, method, path, body=None, fine=()):
        for again in (True, False):
            try:
                if not self.connection:
                    self.connection = http.client.HTTPSConnection("127.0.0.1", self.about["port"], context=self.tls, timeout=60)
                headers = {"Authorization": "Bearer " + self.about["token"], "Content-Type": "application/json"}
                self.connection.request(method, path, None if body is None else json.dumps(body), headers)
                answer = self.connection.getresponse()
                text = answer.read()
                break
            except (OSError, http.client.HTTPException) as problem:
                # The server closes a connection that nobody has used for a while.
                self.connection = None
                if not again:
                    raise Failed(f"{method} {path}: {problem}") from None
        if answer.status >= 300 and answer.status not in fine:
            raise Failed(f"{method} {path}: {answer.status} {text[:300]!r}")
        return json.loads(text)

    def namespace(self, name):
        self.call("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
        account = f"/api/v1/namespaces/{name}/serviceaccounts/default"
        until("a service account", lambda: "uid" in self.call("GET", account, fine=(404,)).get("metadata", {}), 60)

    def start(self, name, *arguments, environment=None):
        with open(os.path.join(self.data, name + ".log"), "a") as log:
            self.children[name] = subprocess.Popen([self.binary, *arguments], stdout=log, stderr=log, env={**os.environ, **(environment or {})})
        return Process(self.children[name].pid)

    def stop(self, name):
        child = self.children.pop(name)
        child.terminate()
        try:
            child.wait(30)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()

    def start_nodes(self, count, environment=None):
        process = self.start("nodes", "simulate-nodes", "--kubeconfig", self.about["nodes"], "--pki", self.pki, "--count", str(count), "--kubelet", "--scheduler",
                             environment=environment)
        ready = lambda node: node["metadata"].get("labels", {}).get("kubevirt.io/schedulable") == "true"
        until("the nodes", lambda: len([n for n in self.call("GET", "/api/v1/nodes")["items"] if ready(n)]) == count)
        return process

    def start_controller(self, journal=True, environment=None, more=()):
        of = lambda ending: os.path.join(self.pki, "client-virtfold-controller." + ending)
        record = ["--journal", os.path.join(self.data, "journal")] if journal else []
        lease = "/apis/coordination.k8s.io/v1/namespaces/virtfold/leases/virtfold-controller"
        holder = lambda: self.call("GET", lease, fine=(404,)).get("spec", {}).get("holderIdentity")
        before = holder()
        process = self.start("controller", "controller", "--kubeconfig", self.about["controller"], "--ca", os.path.join(self.pki, "ca.crt"),
                             "--cert", of("crt"), "--key", of("key"), "--log", "warn", *record, *more,
                             environment=environment)
        until("a leader", lambda: holder() not in (None, "", before), 60)
        return process

    def load(self, what, namespace, count, clients, rate=None, limit=240, steps=None):
        path = os.path.join(self.data, "steps.json")
        with open(path, "w") as file:
            json.dump(steps or [step("POST", API.format("@namespace@") + "virtualmachines", vm(), keep="vm")], file)
        command = [self.chaos, "load", what, "--kubeconfig", os.path.join(self.data, "kubeconfig"), "--steps", path, "--namespace", namespace,
                   "--count", str(count), "--clients", str(clients), "--limit", str(limit)]
        done = subprocess.run(command + (["--rate", str(rate)] if rate else []), capture_output=True, text=True,
                              env={**os.environ, "RUST_BACKTRACE": "0"})
        if done.returncode:
            raise Failed(f"{what} of {count} VMs: " + " ".join(done.stderr.split())[:500])
        return json.loads(done.stdout)

    def others(self):
        """CPU seconds so far of everything that takes part."""
        found = {name: Process(child.pid).cpu() for name, child in self.children.items()}
        for entry in os.listdir("/proc"):
            with contextlib.suppress(OSError, IndexError, ValueError):
                with open(f"/proc/{entry}/stat") as stat:
                    text = stat.read()
                if int(text.rsplit(")", 1)[1].split()[1]) == self.harness.pid:
                    found[text.split("(", 1)[1].rsplit(")", 1)[0]] = Process(int(entry)).cpu()
        return found

    def end(self):
        for name in list(self.children):
            self.stop(name)
        self.harness.stdin.close()
        try:
            self.harness.wait(60)
        except subprocess.TimeoutExpired:
            self.harness.kill()
            self.harness.wait()


class Sink(http.server.ThreadingHTTPServer):
    """A collector of traces that forgets them at once: what it costs is not what is measured."""

    daemon_threads = True

    def __init__(self):
        sink = self
        self.taken = 0

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                sink.taken += len(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_):
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def environment(self):
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{self.server_port}", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}


class Scraper(threading.Thread):
    """Asks a process for its metrics each second, as Prometheus does."""

    def __init__(self, plane, port):
        super().__init__(daemon=True)
        self.port, self.ended, self.pages, self.problem = port, threading.Event(), 0, None
        self.tls = ssl._create_unverified_context()
        self.headers = {"Authorization": "Bearer " + plane.about["token"], "Accept": "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"}
        self.start()

    def run(self):
        while not self.ended.wait(1):
            try:
                connection = http.client.HTTPSConnection("127.0.0.1", self.port, context=self.tls, timeout=10)
                connection.request("GET", "/metrics", headers=self.headers)
                answer = connection.getresponse()
                text = answer.read()
                connection.close()
                if answer.status != 200 or b"virtfold_cells" not in text:
                    self.problem = f"{answer.status} {text[:200]!r}"
                else:
                    self.pages += 1
            except OSError as problem:
                self.problem = str(problem)

    def end(self):
        self.ended.set()
        self.join(30)
        if not self.pages:
            raise Failed(f"no metrics from port {self.port}: {self.problem}")


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def traced(number):
    """A machine whose writes belong to a trace, as admission would have it."""
    machine = vm()
    machine["metadata"]["annotations"] = {"virtfold.io/traceparent": f"00-{number + 1:032x}-{number + 1:016x}-01"}
    return [step("POST", API.format("@namespace@") + "virtualmachines", machine, keep="vm")]


def telemetry(chaos, binary, count, pairs, nodes=20):
    """CPU seconds of controller and node agents for whole lives: with traces and without, with metrics scraped and not, in turn."""
    rows = []

    def say(what, figure):
        rows.append((what, figure))
        print(f"  {what}: {figure}", flush=True)

    def life(plane, what, number, traces, metrics):
        sink, port = Sink(), free_port()
        environment = sink.environment() if traces else {"OTEL_SDK_DISABLED": "true"}
        agents = plane.start_nodes(nodes, environment)
        controller = plane.start_controller(environment=environment, more=("--metrics", f"127.0.0.1:{port}"))
        namespace = f"{what}-{number}"
        plane.namespace(namespace)
        time.sleep(3)
        scraper = Scraper(plane, port) if metrics else None
        before = controller.cpu() + agents.cpu()
        plane.load("churn", namespace, count, 16, steps=traced(number))
        # The last spans and the last block of the journal are on their way for a moment.
        time.sleep(2)
        spent = controller.cpu() + agents.cpu() - before
        if scraper:
            scraper.end()
        for name in list(plane.children):
            plane.stop(name)
        sink.shutdown()
        sink.server_close()
        if traces and not sink.taken:
            raise Failed("no spans came to the collector")
        return spent, sink.taken

    try:
        plane = Plane(chaos, binary, lean=True)
        try:
            for what in ("traces", "metrics"):
                spent, taken = {True: [], False: []}, 0
                for number in range(2 * pairs):
                    # Who goes first changes from pair to pair, so that what grows with time is not one side's.
                    on = (number % 2 == 0) == (number // 2 % 2 == 0)
                    seconds, bytes_taken = life(plane, what, number, what == "traces" and on, what == "metrics" and on)
                    spent[on].append(seconds)
                    taken = max(taken, bytes_taken)
                on, off = (statistics.median(spent[which]) for which in (True, False))
                each = [100 * (a / b - 1) for a, b in zip(spent[True], spent[False])]
                spread = lambda all: f"{min(all):.2f} to {max(all):.2f}"
                name = {"traces": "traces of all", "metrics": "metrics scraped each second"}[what]
                say(f"{name}: CPU of controller and {nodes} agents for {count} lives, with / without",
                    f"{on:.2f} / {off:.2f} s ({pairs} pairs in turn: {spread(spent[True])} / {spread(spent[False])})")
                say(f"{name}: cost", f"{100 * (on / off - 1):.1f} % (median of pairs {statistics.median(each):.1f} %, {min(each):.1f} to {max(each):.1f} %)")
                if taken:
                    say(f"{name}: sent", f"{taken / count / 1024:.1f} KiB a life")
        finally:
            plane.end()
    except Failed as problem:
        say("**did not come to its end**", str(problem))
    return rows


def floor_steps(plane, namespace, name):
    """The writes of one VM's start, in the order in which the server was done with them, with places for what differs from VM to VM."""
    vmi = plane.call("GET", f"{API.format(namespace)}virtualmachineinstances/{name}")
    pods = f"/api/v1/namespaces/{namespace}/pods"
    pod = plane.call("GET", pods)["items"][0]["metadata"]["name"]
    places = [(vmi["metadata"]["uid"], "@vmi@"), (vmi["metadata"]["ownerReferences"][0]["uid"], "@vm@"), (pod, "virt-launcher-@name@"),
              (f'"{namespace}"', '"@namespace@"'), (f'"{name}"', '"@name@"'), ('"kubevirt.io": "virt-launcher"', '"kubevirt.io": "floor"')]
    kinds = {"virtualmachines": (API.format("@namespace@"), "vm"), "virtualmachineinstances": (API.format("@namespace@"), "vmi"),
             "controllerrevisions": ("/apis/apps/v1/namespaces/@namespace@/", "revision"), "pods": ("/api/v1/namespaces/@namespace@/", "pod")}
    steps = [step("POST", API.format("@namespace@") + "virtualmachines", vm(), keep="vm")]
    for event in plane.audit.new():
        about = event.get("objectRef", {})
        if event["user"]["username"] != CONTROLLER or about.get("namespace") != namespace or about.get("resource") not in kinds or event["verb"] not in ("create", "patch"):
            continue
        text = json.dumps(event["requestObject"])
        for old, new in places:
            text = text.replace(old, new)
        body = json.loads(text)
        for key in ("resourceVersion", "uid", "creationTimestamp"):
            body.get("metadata", {}).pop(key, None)
        base, keep = kinds[about["resource"]]
        if event["verb"] == "patch":
            sub = "/" + about["subresource"] if "subresource" in about else ""
            # A policy keeps what is the control plane's for the control plane.
            steps.append(step("PATCH", f"{base}{about['resource']}/@name@{sub}", body, MERGE, user=CONTROLLER))
            continue
        steps.append(step("POST", base + about["resource"], body, keep=keep))
        if about["resource"] == "pods":
            path = f"{base}pods/virt-launcher-@name@"
            binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": "virt-launcher-@name@"}, "target": {"kind": "Node", "name": "sim-0"}}
            statuses = [{"name": c["name"], "ready": True, "started": True, "image": "x", "imageID": "x", "restartCount": 0, "state": {"running": {}}}
                        for c in body["spec"]["containers"]]
            conditions = [{"type": t, "status": "True"} for t in ("PodScheduled", "Initialized", "ContainersReady", "Ready")]
            gate = {"type": "kubevirt.io/virtual-machine-unpaused", "status": "True"}
            steps += [step("POST", path + "/binding", binding),
                      step("PATCH", path + "/status", {"status": {"phase": "Running", "podIP": "10.0.0.2", "containerStatuses": statuses, "conditions": conditions}}, STRATEGIC),
                      step("PATCH", path + "/status", {"status": {"conditions": [gate]}}, STRATEGIC)]
    return steps


def slope(points):
    """Least squares: KiB per VM from (VMs, MiB)."""
    mean_x, mean_y = statistics.mean(x for x, _ in points), statistics.mean(y for _, y in points)
    over = sum((x - mean_x) * (y - mean_y) for x, y in points)
    return 1024 * over / sum((x - mean_x) ** 2 for x, _ in points)


def at(values, part):
    return values[min(len(values) - 1, int(part * len(values)))]


class Bench:
    """All steps, and the rows that they give."""

    def __init__(self, chaos, binary, nodes, say):
        self.chaos, self.binary, self.nodes, self.say = chaos, binary, nodes, say
        self.floors, self.one, self.tables = {}, 0.0, {}

    @contextlib.contextmanager
    def plane(self, lean):
        plane = Plane(self.chaos, self.binary, lean)
        try:
            yield plane
        finally:
            plane.end()

    def first(self, sizes, journal_runs, journal_vms):
        with self.plane(lean=False) as plane:
            plane.start_nodes(self.nodes)
            plane.start_controller()
            plane.namespace("one")
            plane.load("run", "one", 1, 1, limit=60)
            time.sleep(3)
            steps = floor_steps(plane, "one", "vm-0")
            plane.stop("controller")
            try:
                self.journal(plane, journal_runs, journal_vms)
            except Failed as problem:
                # The floor does not need it.
                self.say("**journal: did not come to its end**", str(problem))
            for name in list(plane.children):
                plane.stop(name)
            for count, clients in [(20, 1)] + [(size, CLIENTS) for size in sizes]:
                namespace = f"floor-{count}-{clients}"
                plane.namespace(namespace)
                took = plane.load("floor", namespace, count, clients, steps=steps)["seconds"]
                if clients == 1:
                    self.one = took / count
                    self.say("floor of one VM", f"{self.one * 1000:.0f} ms: a bare client, {len(steps)} writes one after another")
                else:
                    self.floors[count] = took
                    self.say(f"floor, {count} VMs", f"{took:.1f} s: a bare client, {CLIENTS} requests at once, {len(steps)} writes a VM")

    def journal(self, plane, runs, count):
        """CPU seconds of a controller for whole lives, with the journal and without it in turn."""
        spent = {True: [], False: []}
        for number in range(runs * 2):
            on = number % 2 == 0
            controller = plane.start_controller(journal=on)
            namespace = f"journal-{number}"
            plane.namespace(namespace)
            time.sleep(2)
            before = controller.cpu()
            plane.load("churn", namespace, count, 16)
            # The last block is written within a second.
            time.sleep(2)
            spent[on].append(controller.cpu() - before)
            plane.stop("controller")
        if runs:
            on, off = (statistics.median(spent[which]) for which in (True, False))
            pairs = [100 * (a / b - 1) for a, b in zip(spent[True], spent[False])]
            spread = lambda all: f"{min(all):.2f} to {max(all):.2f}"
            self.say(f"journal: controller's CPU for {count} lives, on / off",
                     f"{on:.2f} / {off:.2f} s ({runs} runs each in turn: {spread(spent[True])} / {spread(spent[False])})")
            self.say("journal: cost", f"{100 * (on / off - 1):.1f} % (pairs: {min(pairs):.1f} to {max(pairs):.1f} %)")

    def second(self, sizes, up_to, churn):
        with self.plane(lean=True) as plane:
            plane.start_nodes(self.nodes)
            controller = plane.start_controller()
            time.sleep(5)
            plane.audit.new()
            there, points = 0, [(0, controller.memory()[0])]
            self.say("controller at rest without VMs", f"{points[0][1]:.1f} MiB ({controller.memory()[2]:.1f} of it its own)")

            def run(count, rate=None):
                nonlocal there
                namespace = f"load-{there}-{count}"
                plane.namespace(namespace)
                cpu, all_cpu = controller.cpu(), plane.others()
                done = plane.load("run", namespace, count, 16, rate)
                others = {name: spent - all_cpu.get(name, 0) for name, spent in plane.others().items()}
                time.sleep(3)
                there += count
                resident, most, _ = controller.memory()
                wrote, refused, table = plane.audit.counts(count)
                points.append((there, resident))
                self.tables[f"{count} VMs" + (f", {rate} a second" if rate else " at once")] = (count, table)
                cost = f"{controller.cpu() - cpu:.2f} s CPU, {resident:.0f} MiB (most {most:.0f}), {wrote:.2f} writes a VM, {refused:.2f} of them refused"
                return done, cost, others

            try:
                done, cost, _ = run(100, 10)
                p50, p95 = at(done["latencies"], 0.5), at(done["latencies"], 0.95)
                ratio = f" ({p50 / self.one:.1f} / {p95 / self.one:.1f} times the floor)" if self.one else ""
                self.say("100 VMs, 10 a second: created until Running, p50 / p95", f"{p50:.2f} / {p95:.2f} s{ratio}")
                self.say("100 VMs, 10 a second: controller", cost)
                for size in sizes:
                    done, cost, others = run(size)
                    ratio = f" ({done['seconds'] / self.floors[size]:.2f} times the floor)" if size in self.floors else ""
                    self.say(f"{size} VMs at once: all Running", f"{done['seconds']:.1f} s{ratio}; p50 / p95 {at(done['latencies'], 0.5):.1f} / {at(done['latencies'], 0.95):.1f} s")
                    self.say(f"{size} VMs at once: controller", cost)
                    self.say(f"{size} VMs at once: CPU seconds of all", ", ".join(f"{name} {spent:.1f}" for name, spent in sorted(others.items(), key=lambda o: -o[1])))
                self.idle(plane, controller, there)
                if churn:
                    plane.namespace("churn")
                    plane.audit.new()
                    cpu = controller.cpu()
                    done = plane.load("churn", "churn", churn, 16, 20)
                    time.sleep(3)
                    wrote, refused, table = plane.audit.counts(churn)
                    self.tables["Created and deleted"] = (churn, table)
                    self.say(f"churn: {churn} VMs, 20 a second, each deleted as soon as it runs: created until gone, p50 / p95",
                             f"{at(done['latencies'], 0.5):.2f} / {at(done['latencies'], 0.95):.2f} s; all gone after {done['seconds']:.1f} s")
                    self.say("churn: controller", f"{controller.cpu() - cpu:.2f} s CPU, {controller.memory()[0]:.0f} MiB, {wrote:.2f} writes a VM, {refused:.2f} of them refused")
                if up_to > there:
                    done, cost, _ = run(up_to - there)
                    self.say(f"{done['writes']} more VMs, {there} in all", f"{done['seconds']:.1f} s; controller {cost}")
                    self.idle(plane, controller, there)
            finally:
                if len(points) > 1:
                    self.say("controller's memory a VM (regression)", f"{slope(points):.1f} KiB over " + ", ".join(f"{x}: {y:.0f} MiB" for x, y in points))

    def idle(self, plane, controller, there, seconds=20):
        time.sleep(3)
        plane.audit.new()
        cpu = controller.cpu()
        time.sleep(seconds)
        _, _, table = plane.audit.counts()
        told = "none" if not table else ", ".join(f"{verb} {resource} {code}: {n}" for (verb, resource, code), n in table.items())
        self.say(f"at rest for {seconds} s with {there} VMs: calls but for the Lease and watches", f"{told}; {controller.cpu() - cpu:.2f} s CPU")


def bench(chaos, binary, sizes, nodes=20, up_to=5000, churn=300, journal_runs=3, journal_vms=300):
    """Runs everything; rows of (what, figure), and tables of calls by (verb, resource, code of a refusal) for each load."""
    rows = []

    def say(what, figure):
        rows.append((what, figure))
        print(f"  {what}: {figure}", flush=True)

    it = Bench(chaos, binary, nodes, say)
    for part in (lambda: it.first(sizes, journal_runs, journal_vms), lambda: it.second(sizes, up_to, churn)):
        try:
            part()
        except Failed as problem:
            say("**did not come to its end**", str(problem))
    return rows, it.tables

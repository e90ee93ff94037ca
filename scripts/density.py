"""How the controller does under load, on a real kube-apiserver; for `scripts/bench --kubernetes`.

A bare client first does the writes of a VM's start (those that the controller, the kubelet and the node agent were seen to do for one
VM), with no controller: the floor. Then the controller and simulated nodes do it. Both in the same run, so that their ratio says something
on any machine. Nothing but the standard library is used.
"""

import concurrent.futures
import copy
import http.client
import json
import os
import queue
import re
import ssl
import statistics
import subprocess
import threading
import time

VMS = "/apis/kubevirt.io/v1/namespaces/{}/virtualmachines"
VMIS = "/apis/kubevirt.io/v1/namespaces/{}/virtualmachineinstances"
PODS = "/api/v1/namespaces/{}/pods"
REVISIONS = "/apis/apps/v1/namespaces/{}/controllerrevisions"
MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
# As many requests at once as the controller has.
CLIENTS = 64


class Failed(Exception):
    """The bench cannot go on."""


def vm(name):
    return {"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": {"name": name}, "spec": {
        "runStrategy": "Always", "template": {"metadata": {"labels": {"load": "density"}}, "spec": {
            "terminationGracePeriodSeconds": 0,
            "domain": {"resources": {"requests": {"memory": "90Mi", "cpu": "100m"}},
                       "devices": {"disks": [{"name": "containerdisk", "disk": {"bus": "virtio"}}],
                                   "interfaces": [{"name": "default", "masquerade": {}}]}},
            "networks": [{"name": "default", "pod": {}}],
            "volumes": [{"name": "containerdisk", "containerDisk": {"image": "registry.local/alpine:1"}}]}}}}


class Server:
    """The API server; each thread has a connection of its own."""

    def __init__(self, about):
        self.port, self.token, self.local = about["port"], about["token"], threading.local()
        self.tls = ssl.create_default_context(cafile=os.path.join(about["data"], "pki/ca.crt"))

    def connect(self):
        return http.client.HTTPSConnection("127.0.0.1", self.port, context=self.tls, timeout=60)

    def headers(self, kind="application/json"):
        return {"Authorization": "Bearer " + self.token, "Content-Type": kind, "User-Agent": "density"}

    def call(self, method, path, body=None, kind="application/json", fine=()):
        connection = getattr(self.local, "connection", None) or self.connect()
        self.local.connection = connection
        connection.request(method, path, None if body is None else json.dumps(body), self.headers(kind))
        answer = connection.getresponse()
        text = answer.read()
        if answer.status >= 300 and answer.status not in fine:
            raise Failed(f"{method} {path}: {answer.status} {text[:300]!r}")
        return json.loads(text)

    def namespace(self, name):
        self.call("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
        end = time.monotonic() + 60
        while "uid" not in self.call("GET", f"/api/v1/namespaces/{name}/serviceaccounts/default", fine=(404,)).get("metadata", {}):
            if time.monotonic() > end:
                raise Failed(f"namespace {name} gets no service account")
            time.sleep(0.1)


class Watch(threading.Thread):
    """When each VMI of a namespace was seen Running first."""

    def __init__(self, server, namespace):
        super().__init__(daemon=True)
        self.running, self.news = {}, queue.Queue()
        path = VMIS.format(namespace)
        version = server.call("GET", path + "?limit=1")["metadata"]["resourceVersion"]
        self.connection = server.connect()
        self.connection.request("GET", f"{path}?watch=1&resourceVersion={version}&timeoutSeconds=1800", headers=server.headers())
        self.answer = self.connection.getresponse()
        self.connection.sock.settimeout(None)
        self.start()

    def run(self):
        try:
            for line in self.answer:
                event = json.loads(line)["object"]
                name = event.get("metadata", {}).get("name")
                if event.get("status", {}).get("phase") == "Running" and name not in self.running:
                    self.running[name] = time.monotonic()
                    self.news.put(name)
        except (OSError, ValueError, http.client.HTTPException):
            return

    def wait(self, count, limit):
        end = time.monotonic() + limit
        while len(self.running) < count:
            try:
                self.news.get(timeout=max(0.01, end - time.monotonic()))
            except queue.Empty:
                raise Failed(f"{len(self.running)} of {count} VMs run after {limit} s") from None


def usage(pid):
    """CPU seconds, resident MiB, most ever resident MiB."""
    with open(f"/proc/{pid}/stat") as stat:
        fields = stat.read().rsplit(")", 1)[1].split()
    with open(f"/proc/{pid}/status") as status:
        text = status.read()
    size = {key: int(re.search(key + r":\s+(\d+)", text)[1]) / 1024 for key in ("VmRSS", "VmHWM")}
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), size["VmRSS"], size["VmHWM"]


def writes(data, user="virtfold-controller"):
    """Writes of a user in the audit log so far, but for its Lease: done, refused."""
    done = refused = 0
    with open(os.path.join(data, "audit.log")) as log:
        for line in log:
            event = json.loads(line) if line.endswith("\n") else {}
            if event.get("user", {}).get("username") != user or event.get("stage") != "ResponseComplete":
                continue
            if event["verb"] in ("create", "update", "patch", "delete") and event["objectRef"]["resource"] != "leases":
                done += 1
                refused += event["responseStatus"]["code"] >= 400
    return done, refused


class Template:
    """The writes of one VM's start: its own objects, and what was sent for them, from the audit log."""

    def __init__(self, server, data, namespace, name):
        self.server, self.name = server, name
        vmi = server.call("GET", f"{VMIS.format(namespace)}/{name}")
        self.old = {"vmi": vmi["metadata"]["uid"], "vm": vmi["metadata"]["ownerReferences"][0]["uid"], "namespace": namespace}
        self.calls, self.pod = [], None
        with open(os.path.join(data, "audit.log")) as log:
            for line in log:
                event = json.loads(line)
                about = event.get("objectRef", {})
                if about.get("namespace") != namespace or event["stage"] != "ResponseComplete" or "requestObject" not in event:
                    continue
                if about["resource"] in ("virtualmachines", "virtualmachineinstances", "controllerrevisions", "pods"):
                    self.calls.append((event["verb"], about["resource"], about.get("subresource", ""), event["requestObject"]))
        self.pod = next(body["metadata"]["name"] for verb, resource, _, body in self.calls if (verb, resource) == ("create", "pods"))

    def play(self, namespace, name):
        """Does them for another VM, one after another; the number of writes."""
        uids = {"vm": self.server.call("POST", VMS.format(namespace), vm(name))["metadata"]["uid"]}
        pod, count = f"virt-launcher-{name}", 1

        def fit(body):
            text = json.dumps(body).replace(self.old["vm"], uids["vm"]).replace(self.old["vmi"], uids.get("vmi", ""))
            # The simulated nodes must not take these pods for theirs.
            text = text.replace('"kubevirt.io": "virt-launcher"', '"kubevirt.io": "floor"').replace(self.pod, pod).replace(f'"{self.old["namespace"]}"', f'"{namespace}"').replace(f'"{self.name}"', f'"{name}"')
            body = json.loads(text.replace(self.old.get("pod", "-"), uids.get("pod", "-")))
            for key in ("resourceVersion", "uid", "creationTimestamp"):
                body.get("metadata", {}).pop(key, None)
            return body

        for verb, resource, subresource, body in self.calls:
            path = {"virtualmachines": VMS, "virtualmachineinstances": VMIS, "controllerrevisions": REVISIONS, "pods": PODS}[resource]
            path = path.format(namespace)
            if verb == "create":
                made = self.server.call("POST", path, fit(body))
                count += 1
                if resource == "virtualmachineinstances":
                    uids["vmi"] = made["metadata"]["uid"]
                if resource == "pods":
                    count += self.kubelet(f"{path}/{pod}", made)
            else:
                one = f"{path}/{name}" + (f"/{subresource}" if subresource else "")
                self.server.call("PATCH", one, fit(body), MERGE)
                count += 1
        return count

    def kubelet(self, path, pod):
        """Binding, status, and the condition that the node agent writes."""
        name = pod["metadata"]["name"]
        self.server.call("POST", path + "/binding", {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": {"kind": "Node", "name": "sim-0"}})
        statuses = [{"name": c["name"], "ready": True, "started": True, "image": "x", "imageID": "x", "restartCount": 0, "state": {"running": {}}}
                    for c in pod["spec"]["containers"]]
        conditions = [{"type": t, "status": "True"} for t in ("PodScheduled", "Initialized", "ContainersReady", "Ready")]
        self.server.call("PATCH", path + "/status", {"status": {"phase": "Running", "podIP": "10.0.0.2", "containerStatuses": statuses, "conditions": conditions}}, STRATEGIC)
        gate = {"type": "kubevirt.io/virtual-machine-unpaused", "status": "True"}
        self.server.call("PATCH", path + "/status", {"status": {"conditions": [gate]}}, STRATEGIC)
        return 3


def burst(action, names, clients):
    """Does it for all names with so many clients; the seconds that it took."""
    began = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        for result in [pool.submit(action, name) for name in names]:
            result.result()
    return time.monotonic() - began


class Bench:
    """One control plane, one controller, one process of nodes."""

    def __init__(self, about, binary, nodes):
        self.about, self.binary, self.server, self.rows, self.children = about, binary, Server(about), [], []
        self.data, self.pki = about["data"], os.path.join(about["data"], "pki")
        self.start("nodes", "simulate-nodes", "--kubeconfig", about["nodes"], "--pki", self.pki, "--count", str(nodes), "--kubelet", "--scheduler")
        self.until("the nodes", lambda: len([n for n in self.server.call("GET", "/api/v1/nodes")["items"]
                                             if n["metadata"].get("labels", {}).get("kubevirt.io/schedulable") == "true"]) == nodes)
        self.controller = self.start_controller()
        self.taken = 0

    def start(self, name, *arguments):
        with open(os.path.join(self.data, name + ".log"), "a") as log:
            child = subprocess.Popen([self.binary, *arguments], stdout=log, stderr=log)
        self.children.append(child)
        return child

    def start_controller(self):
        of = lambda ending: os.path.join(self.pki, "client-virtfold-controller." + ending)
        return self.start("controller", "controller", "--kubeconfig", self.about["controller"], "--ca", os.path.join(self.pki, "ca.crt"),
                          "--cert", of("crt"), "--key", of("key"), "--log", "warn", "--journal", os.path.join(self.data, "journal"))

    def until(self, what, holds, limit=120):
        end = time.monotonic() + limit
        while not holds():
            if time.monotonic() > end:
                raise Failed(f"not within {limit} s: {what}")
            time.sleep(0.2)

    def end(self):
        for child in reversed(self.children):
            child.terminate()
            try:
                child.wait(30)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()

    def template(self):
        self.server.namespace("one")
        watch = Watch(self.server, "one")
        self.server.call("POST", VMS.format("one"), vm("first"))
        watch.wait(1, 60)
        time.sleep(2)
        return Template(self.server, self.data, "one", "first")

    def floor(self, template, count, clients):
        """The controller stands still meanwhile: it must not answer the bare client's VMs."""
        self.controller.terminate()
        self.controller.wait(30)
        namespace = f"floor-{count}-{clients}"
        self.server.namespace(namespace)
        wrote = []
        took = burst(lambda n: wrote.append(template.play(namespace, n)), [f"vm-{n}" for n in range(count)], clients)
        self.clear(namespace)
        self.children.remove(self.controller)
        self.controller = self.start_controller()
        return took, statistics.mean(wrote)

    def clear(self, namespace):
        """Objects of a namespace go without a controller: finalizers are taken off."""
        names = [item["metadata"]["name"] for item in self.server.call("GET", VMS.format(namespace))["items"]]

        def remove(name):
            for path in (VMIS, VMS):
                one = f"{path.format(namespace)}/{name}"
                self.server.call("PATCH", one, {"metadata": {"finalizers": None}}, MERGE, fine=(404,))
                self.server.call("DELETE", one, {"propagationPolicy": "Background"}, fine=(404,))

        burst(remove, names, 16)
        # Nobody is their kubelet.
        self.server.call("DELETE", PODS.format(namespace), {"kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": 0})
        self.until("the end of the floor", lambda: not self.server.call("GET", PODS.format(namespace) + "?limit=1")["items"])

    def run(self, count, rate=0, limit=240):
        """Creates so many VMs and waits until all run; keeps them."""
        namespace = f"load-{count}-{rate}"
        self.server.namespace(namespace)
        watch, created = Watch(self.server, namespace), {}
        cpu, wrote = usage(self.controller.pid), writes(self.data)
        began = time.monotonic()

        def create(name):
            created[name] = time.monotonic()
            self.server.call("POST", VMS.format(namespace), vm(name))

        names = [f"vm-{n}" for n in range(count)]
        if rate:
            with concurrent.futures.ThreadPoolExecutor(16) as pool:
                for number, name in enumerate(names):
                    time.sleep(max(0, began + number / rate - time.monotonic()))
                    pool.submit(create, name)
        else:
            burst(create, names, 16)
        watch.wait(count, limit)
        took = time.monotonic() - began
        time.sleep(3)
        after, wrote_after = usage(self.controller.pid), writes(self.data)
        latencies = sorted(watch.running[name] - created[name] for name in names)
        self.taken += count
        return {"wall": took, "p50": latencies[len(latencies) // 2], "p95": latencies[int(len(latencies) * 0.95)], "cpu": after[0] - cpu[0],
                "rss": after[1], "peak": after[2], "writes": (wrote_after[0] - wrote[0]) / count, "refused": (wrote_after[1] - wrote[1]) / count,
                "namespace": namespace}

    def delete(self, namespace, count, limit=240):
        cpu, wrote, began = usage(self.controller.pid), writes(self.data), time.monotonic()
        self.server.call("DELETE", VMS.format(namespace))
        left = lambda: any(self.server.call("GET", path.format(namespace) + "?limit=1")["items"] for path in (VMS, VMIS, PODS))
        self.until("the end of the VMs", lambda: not left(), limit)
        took = time.monotonic() - began
        after, wrote_after = usage(self.controller.pid), writes(self.data)
        self.taken -= count
        return {"wall": took, "cpu": after[0] - cpu[0], "rss": after[1], "peak": after[2],
                "writes": (wrote_after[0] - wrote[0]) / count, "refused": (wrote_after[1] - wrote[1]) / count}


def slope(points):
    """Least squares: KiB per VM from (VMs, MiB)."""
    mean_x, mean_y = statistics.mean(x for x, _ in points), statistics.mean(y for _, y in points)
    over = sum((x - mean_x) * (y - mean_y) for x, y in points)
    return 1024 * over / sum((x - mean_x) ** 2 for x, _ in points)


def bench(chaos, binary, sizes, nodes=20):
    """Runs everything; rows of (what, figure)."""
    harness = subprocess.Popen([chaos, "kubernetes"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "VIRTFOLD": binary})
    it = None
    try:
        line = harness.stdout.readline()
        if not line:
            raise Failed("the control plane of Kubernetes did not start")
        it = Bench(json.loads(line), binary, nodes)
        rows, say = [], lambda what, figure: (rows.append((what, figure)), print(f"  {what}: {figure}", flush=True))
        it.until("a leader", lambda: usage(it.controller.pid)[1] > 0)
        template = it.template()
        alone, _ = it.floor(template, 20, 1)
        floors = {}
        for size in sizes:
            floors[size], wrote = it.floor(template, size, CLIENTS)
            say(f"floor, {size} VMs: a bare client, {CLIENTS} connections, {wrote:.0f} writes each", f"{floors[size]:.1f} s")
        say("floor of one VM: the same writes one after another", f"{alone / 20:.3f} s")
        it.until("a session", lambda: time.sleep(3) or True)
        points = [(0, usage(it.controller.pid)[1])]
        slow = it.run(100, rate=10)
        say("100 VMs, 10 a second: created until Running, p50 / p95",
            f"{slow['p50']:.2f} / {slow['p95']:.2f} s ({slow['p50'] / (alone / 20):.1f} / {slow['p95'] / (alone / 20):.1f} times the floor)")
        say("100 VMs, 10 a second: controller", f"{slow['cpu']:.2f} s CPU, {slow['writes']:.2f} writes and {slow['refused']:.2f} refused a VM")
        points.append((it.taken, slow["rss"]))
        for size in sizes:
            fast = it.run(size)
            say(f"{size} VMs at once: all Running", f"{fast['wall']:.1f} s ({fast['wall'] / floors[size]:.1f} times the floor)")
            say(f"{size} VMs at once: controller", f"{fast['cpu']:.2f} s CPU, {fast['rss']:.0f} MiB (most {fast['peak']:.0f}), "
                f"{fast['writes']:.2f} writes and {fast['refused']:.2f} refused a VM")
            points.append((it.taken, fast["rss"]))
        before = len([1 for _ in open(os.path.join(it.data, "audit.log"))])
        cpu = usage(it.controller.pid)[0]
        time.sleep(20)
        idle = [json.loads(text) for text in list(open(os.path.join(it.data, "audit.log")))[before:]]
        calls = [e for e in idle if e["user"]["username"] == "virtfold-controller" and e["objectRef"].get("resource") != "leases" and e["verb"] != "watch"]
        say(f"idle for 20 s with {it.taken} VMs: calls but for the Lease and watches", f"{len(calls)} ({usage(it.controller.pid)[0] - cpu:.2f} s CPU)")
        say("controller's memory a VM (regression)", f"{slope(points):.1f} KiB over " + ", ".join(f"{x}: {y:.0f} MiB" for x, y in points))
        gone = it.delete(slow["namespace"], 100)
        say("100 VMs deleted: all gone", f"{gone['wall']:.1f} s, controller {gone['cpu']:.2f} s CPU, {gone['writes']:.2f} writes and {gone['refused']:.2f} refused a VM")
        return rows
    finally:
        if it:
            it.end()
        harness.stdin.close()
        harness.wait(60)

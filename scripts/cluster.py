"""What scripts/demo and scripts/bench share: a cluster of `virtfold up`, kubectl, the serial console, waiting with a deadline."""

import hashlib
import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import time

TOP = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
KUBECTL = os.path.join(TOP, "target/venv/bin/kubectl")
GUEST = os.path.join(TOP, "target/guest")
IMAGE = "localhost/virtfold/guest:latest"


class Problem(Exception):
    """Something did not go as it should; the text is for a person."""


def until(what, seconds, look, progress=None):
    """Asks `look` until it gives something other than None, at most so long. `progress` hears what is going on."""
    deadline = time.monotonic() + seconds
    while True:
        found = look()
        if found is not None:
            return found
        if progress:
            progress()
        if time.monotonic() > deadline:
            raise Problem(f"waited {seconds} s for {what}")
        time.sleep(0.1)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def processes():
    """Process ids with their arguments."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/cmdline", "rb") as file:
                    arguments = file.read().replace(b"\0", b" ").decode(errors="replace").strip()
            except OSError:
                continue
            if arguments:
                found[int(entry)] = arguments
    return found


class Cluster:
    """A cluster on one data folder. Its process is remembered there, so that a later run finds it."""

    def __init__(self, data, binary, nodes=1):
        self.data = os.path.abspath(data)
        self.binary = binary
        self.nodes = nodes
        self.pid_file = self.data + ".pid"
        self.log = self.data + ".log"
        self.kubeconfig = os.path.join(self.data, "kubeconfig")
        self.process = None

    @property
    def id(self):
        return hashlib.sha256(os.path.realpath(self.data).encode()).hexdigest()[:8]

    def pid(self):
        """The process of a running `virtfold up` on this folder, or None."""
        try:
            with open(self.pid_file) as file:
                pid = int(file.read())
        except (OSError, ValueError):
            return None
        arguments = processes().get(pid, "")
        return pid if "virtfold" in arguments and self.data in arguments else None

    def start(self, progress=None):
        os.makedirs(os.path.dirname(self.data), exist_ok=True)
        command = [self.binary, "up", "--data-dir", self.data, "--listen", f"127.0.0.1:{free_port()}",
                   "--nodes", str(self.nodes), "--image", f"{IMAGE}={GUEST}/oci"]
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        with open(self.pid_file, "w") as file:
            file.write(f"{self.process.pid}\n")

        def ready():
            if self.process.poll() is not None:
                raise Problem(f"virtfold up ended with {self.process.returncode}:\n{self.said()}")
            if not os.path.exists(self.kubeconfig):
                return None
            try:
                nodes = self.json("get", "nodes")["items"]
            except Problem:
                return None
            good = [node for node in nodes if node["metadata"].get("labels", {}).get("kubevirt.io/schedulable") == "true"
                    and any(c["type"] == "Ready" and c["status"] == "True" for c in node["status"].get("conditions", []))]
            return True if len(good) == self.nodes else None

        until(f"the cluster (its log: {self.log})", 90, ready, progress)

    def said(self, lines=25):
        try:
            with open(self.log, errors="replace") as file:
                return "".join(file.readlines()[-lines:])
        except OSError:
            return ""

    def kubectl(self, *arguments, check=True):
        environment = dict(os.environ, KUBECONFIG=self.kubeconfig, KUBECACHEDIR=self.data + ".kubecache")
        done = subprocess.run([KUBECTL, *arguments], env=environment, text=True, stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        if check and done.returncode != 0:
            raise Problem(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout if done.returncode == 0 else None

    def json(self, *arguments):
        return json.loads(self.kubectl(*arguments, "-o", "json"))

    def get(self, kind, name):
        """An object, or None."""
        text = self.kubectl("get", kind, name, "-o", "json", check=False)
        return json.loads(text) if text else None

    def stop(self, seconds=90):
        """Takes the cluster down, guests too; returns what is left on the machine."""
        pid = self.pid()
        if pid is not None:
            os.kill(pid, signal.SIGTERM)
            until("the end of virtfold up", seconds, lambda: True if self.pid() is None else None)
        if self.process is not None:
            self.process.wait(seconds)
        if os.path.exists(self.data):
            done = subprocess.run([self.binary, "down", "--data-dir", self.data], text=True, timeout=seconds,
                                  stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            if done.returncode != 0:
                raise Problem(f"virtfold down ended with {done.returncode}:\n{done.stdout}")
        deadline = time.monotonic() + 20
        while (left := self.leftovers()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return left

    def leftovers(self):
        """Processes, network namespaces, mounts and sockets that carry this cluster's name."""
        run = f"/run/virtfold/{self.id}"
        found = [f"process {pid}: {arguments}" for pid, arguments in processes().items()
                 if (self.data in arguments or run in arguments) and pid != os.getpid() and "scripts/" not in arguments]
        if os.path.isdir("/run/netns"):
            found += [f"network namespace {name}" for name in os.listdir("/run/netns") if name.startswith(f"vf-{self.id}-")]
        with open("/proc/mounts") as mounts:
            found += [f"mount {line.split()[1]}" for line in mounts if run in line or self.data in line]
        if os.path.isdir(run) and os.listdir(run):
            found.append(f"files in {run}")
        return found


class Console:
    """The serial console of a guest, through `virtfold console` in a terminal of its own."""

    def __init__(self, cluster, vm):
        self.seen = ""
        master, slave = pty.openpty()
        self.terminal = master
        self.process = subprocess.Popen([cluster.binary, "console", vm], stdin=slave, stdout=slave, stderr=slave,
                                        env=dict(os.environ, KUBECONFIG=cluster.kubeconfig), start_new_session=True)
        os.close(slave)

    def send(self, text):
        os.write(self.terminal, text.encode())

    def expect(self, pattern, seconds):
        """Waits for a pattern; forgets what was before its end. None if it does not come."""
        deadline = time.monotonic() + seconds
        while not (found := re.search(pattern, self.seen)):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.terminal], [], [], left)[0]:
                return None
            try:
                self.seen += os.read(self.terminal, 65536).decode(errors="replace")
            except OSError:
                return None
        self.seen = self.seen[found.end():]
        return found

    def login(self, seconds=90):
        """Waits for a prompt, logs in and waits for the shell. Enter brings a new prompt to somebody who comes late, or where the guest's
        services have written right after one."""
        deadline = time.monotonic() + seconds
        typed = "\r"
        while True:
            self.send(typed)
            found = self.expect(r"(login: )$|# (\x1b\[6n)?$", 1)
            if found and not found.group(1):
                break
            if time.monotonic() > deadline:
                raise Problem(f"no shell on the console within {seconds} s; it shows:\n{self.seen}")
            typed = "root\r" if found else "\r"
        self.send("PS1='# '; stty -echo cols 500\r")
        self.run("true")

    def run(self, command):
        """Runs a command in the guest; returns its output. The guest puts the marks together, so that an echo is none."""
        self.send(f"echo BEG''IN.; {command}; echo E''ND.\r")
        if not self.expect(r"BEGIN\.\r?\n", 20):
            raise Problem(f"the guest's shell does not answer; the console shows:\n{self.seen}")
        found = self.expect(r"(?s)\A(.*?)END\.\r?\n", 20)
        if not found:
            raise Problem(f"'{command}' does not end in the guest; the console shows:\n{self.seen}")
        return found.group(1).replace("\r", "").rstrip()

    def logout(self):
        """Leaves a login prompt to whoever comes next, and a terminal that shows what is typed."""
        self.send("stty echo; exit\r")
        self.expect("login: $", 20)

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.terminal)


def fail(error):
    print(f"\n{error}", file=sys.stderr)
    return 1

# What one can do here. Everything that is missing on a Debian machine is installed by scripts/setup, which says so.
SHELL := /bin/bash
MAKEFLAGS += --no-print-directory

.PHONY: help setup guest go-tools build demo demo-down test lint bench

help:
	@echo "make demo       one manifest, one real guest: build all, start a cluster, run docs/demo/vm.yaml, take all down"
	@echo "                (KEEP=1 make demo leaves it up; make demo-down takes that down)"
	@echo "make test       every test; TEST=name runs those whose names contain it, PACKAGE=crate those of one crate"
	@echo "make lint       formatting and clippy"
	@echo "make bench      the figures of README.md, then those on a real kube-apiserver (needs Go)"
	@echo "make go-tools   kube-apiserver, kube-controller-manager and Jaeger for tests and benches (target/go/bin; needs Go)"
	@echo "make guest      the guest image (target/guest); guest/check boots it in a bare QEMU"
	@echo "make setup      install what is missing"
	@echo "make build      the virtfold binary (target/debug/virtfold)"

setup:
	@scripts/setup

guest: setup
	@guest/build

go-tools:
	@scripts/go-tools

build: setup
	@cargo build --locked --workspace --bins

demo:
	@scripts/demo

demo-down:
	@scripts/demo --down

test: guest
	@scripts/test $(if $(PACKAGE),--package $(PACKAGE)) $(if $(TEST),--filter $(TEST))

lint: setup
	@cargo fmt --all --check
	@cargo clippy --locked --workspace --all-targets --features chaos-tests/sim -- -D warnings

bench: guest
	@scripts/bench
	@scripts/bench --kubernetes

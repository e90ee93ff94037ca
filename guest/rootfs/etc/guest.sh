# Shared by the guest's scripts.
export PATH=/bin:/sbin

# mark TEXT: a line on the serial console that tests and people can wait for.
mark() {
  echo "virtfold-guest: $* (up $(cut -d' ' -f1 /proc/uptime) s)" >/dev/console
}

# wait_for N COMMAND...: until COMMAND succeeds, at most N times 50 ms.
wait_for() {
  left=$1
  shift
  while ! "$@"; do
    left=$((left - 1))
    [ $left -gt 0 ] || return 1
    usleep 50000
  done
}

# page: what the web server shows.
page() {
  mkdir -p /www
  {
    echo "hello from $(hostname)"
    echo "addresses: $(ip -4 -o addr show scope global | awk '{print $2 " " $4}' | tr '\n' ' ')"
    echo "kernel: $(uname -r)"
  } >/www/index.html
}

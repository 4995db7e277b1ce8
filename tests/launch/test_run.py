"""How the launcher's process exits."""

from __future__ import annotations

import subprocess
import sys

# A launcher whose job ends with 7, after a call to a store that has fallen silent. The store answers (here:
# its connection breaks) just when the interpreter shuts down.
LAUNCH = """
import atexit, os, signal, subprocess, sys
from aegis_elastic.agents.peers import peers as peers_module
from aegis_elastic.agents.peers import stores
from aegis_elastic.launch import launcher, run

peers_module.CALL_TIMEOUT_S = peers_module.JOIN_S = 0.3

class Launcher:
    def __init__(self, *_):
        pass

    def run(self):
        serve = "from aegis_elastic.agents.peers import stores; import time\\n"
        serve += "s = stores.serve('127.0.0.1', 0); print(s.port, flush=True); time.sleep(100)"
        quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        host = subprocess.Popen([sys.executable, "-c", serve], **quiet)
        atexit.register(host.kill)
        address = f"127.0.0.1:{host.stdout.readline().strip()}"
        peers = peers_module.Peers(address, 0, ("a",), lambda p: None, lambda p, a: None, lambda: None)
        os.kill(host.pid, signal.SIGSTOP)
        try:
            peers.claim("x")
        except stores.StoreGone as error:
            print(error, flush=True)
        peers.close()
        peers.join()
        print(host.pid, flush=True)
        return 7

launcher.Launcher = Launcher
sys.exit(run.main(["--aegis-bootcheck", "off", "--standalone", "--no-python", "true"]))
"""


def test_a_store_whose_host_fell_silent_does_not_change_the_exit_code() -> None:
    done = subprocess.run([sys.executable, "-c", LAUNCH], capture_output=True, text=True, timeout=60)
    output, pid = done.stdout.splitlines()
    try:
        assert "doesn't answer in" in output
        assert done.returncode == 7, done.stderr
    finally:
        subprocess.run(["kill", "-9", pid], capture_output=True)

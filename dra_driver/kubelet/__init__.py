"""The kubelet's side of the plugin: registration, DRA v1 and v1beta1, and health, over gRPC.

sockets.py       which path each socket has, and whether it may be taken
serving.py       gRPC servers with limits; those on a Unix socket become visible only once they serve
rpc.py           request ids, logs and error texts common to all calls; and how a call is made
registration.py  the registration service the kubelet's plugin watcher calls
claim_check.py   what a claim reference from the wire may look like
dra.py           the DRA service, v1 and v1beta1
device_health.py where a device health stream plugs in
registry.py      which sockets on the node belong to this plugin, and which to another driver of its name
liveness.py      whether our own sockets answer
health_port.py   gRPC health for probes, on TCP
server.py        KubeletPlugin: starts and stops all of it in order
"""

import os

# gRPC reads both when it is imported. Its C library would write lines of its own between the events of the log: what
# they report, its calls return too. And nothing here forks without an exec.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

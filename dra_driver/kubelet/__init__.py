"""The kubelet's side of the plugin: registration, DRA v1 and v1beta1, and health, over gRPC.

sockets.py       which path each socket has, and whether it may be taken
grpc_server.py   servers with limits, whose Unix sockets become visible only once they serve; how a call is made
registration.py  the service that the kubelet's plugin watcher calls, and the other drivers of our name on the node
dra.py           the DRA service, v1 and v1beta1, and what a claim reference from the wire may look like
liveness.py      whether our own sockets answer, and gRPC health for probes
plugin.py        KubeletPlugin: starts and stops all of it in order"""

import os

# gRPC reads both when it is imported. Its C library would write lines of its own between the events of the log: what
# they report, its calls return too. And nothing here forks without an exec.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

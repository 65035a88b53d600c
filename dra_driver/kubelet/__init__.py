"""The kubelet's side of the plugin: registration, DRA v1 and v1beta1, and health, over gRPC.

sockets.py       paths of sockets, and checks before binding one
grpc_server.py   servers with limits and calls; a Unix socket becomes visible only when its server responds
registration.py  the registration service, and detection of other drivers with our name on the node
dra.py           the DRA service, v1 and v1beta1, and checks of claim references
liveness.py      whether our own sockets respond, and gRPC health for probes
plugin.py        KubeletPlugin: starts and stops all of this in order
"""

import os

# gRPC reads both variables when it is imported. Its C library would write its own lines into the log, although
# its calls return the same errors. It needs no fork support, because the plugin never forks without an exec.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

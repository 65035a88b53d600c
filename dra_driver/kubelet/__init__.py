"""The kubelet's side of the plugin: registration, DRA v1 and v1beta1, and health, over gRPC."""

import os

# gRPC reads both variables when it is imported. Its C library would write its own lines into the log, although
# its calls return the same errors. It needs no fork support, because the plugin never forks without an exec.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

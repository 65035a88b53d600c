"""The kubelet's side of the driver: registration, DRA v1 and v1beta1, and health, over gRPC.

sockets.py       which path each socket has, and whether it may be taken
listener.py      one gRPC server on one socket, visible only once it serves
workers.py       threads that come with the calls and leave when idle
rpc.py           request ids, logs and error texts common to all calls
registration.py  the registration service the kubelet's plugin watcher calls
claim_check.py   what a claim reference from the wire may look like
v1.py v1beta1.py the DRA service; it calls a ClaimService
device_health.py where a device health stream plugs in
grpc_health.py   gRPC health for probes: dials our own sockets
server.py        KubeletPlugin: starts and stops all of it in order
"""

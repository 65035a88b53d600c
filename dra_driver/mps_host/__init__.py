"""MPS control daemons: one for each GPU or MIG device, or for all GPUs of a request, run by a separate small process.

`host_supervisor` is that process, the MPS host; `host_files` are the files that it exchanges with the plugin. Control
daemons keep running if the host or the plugin exits.
"""

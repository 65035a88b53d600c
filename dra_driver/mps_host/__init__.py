"""MPS control daemons: one for each GPU or MIG device, or for the GPUs of a request, run by a separate small
process.

`host_supervisor` is that process; `host_files` are the files that it exchanges with the plugin. Control
daemons keep running if either of the two exits.
"""

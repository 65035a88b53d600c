"""MPS control daemons: one for each GPU or MIG device, or for all GPUs of a request.

The MPS host (`host_supervisor`), a separate process, runs them, and exchanges files with the plugin (`host_files`).
"""

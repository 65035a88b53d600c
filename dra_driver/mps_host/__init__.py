"""MPS control daemons, one a GPU or MIG device or for the GPUs of a request, run by a small process of their own.

`host_supervisor` is that process, and `host_files` what it and the plugin write for each other. The control daemons
outlive both.
"""

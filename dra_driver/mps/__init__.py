"""MPS control daemons, one a GPU or MIG device or for the GPUs of a request, run by a small process of their own.

`server` and `supervisor` are that process, `client` is how the plugin asks it, `protocol` is what they say to each
other. The control daemons outlive all of them.
"""

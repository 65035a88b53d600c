"""All traffic with the API server: configuration, transport, API versions, claims, slices, nodes.

Objects are plain dicts, and callers always see the shape of `resource.k8s.io/v1`, whatever version the
server speaks. Nothing is imported here: a command loads the modules that it uses.
"""

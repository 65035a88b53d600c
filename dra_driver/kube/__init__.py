"""All traffic with the API server. Objects are plain dicts in the shape of `resource.k8s.io/v1`.

Nothing is imported here, so a command loads only the modules that it uses.
"""

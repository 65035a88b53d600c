"""Our verdicts on selectors against those of Kubernetes' own compiler."""

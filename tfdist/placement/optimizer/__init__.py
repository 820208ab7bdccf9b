"""The state of an optimizer, divided over the replicas."""

"""What `tfdist.launch` does: tasks, the processes that own them, logs, restarts."""

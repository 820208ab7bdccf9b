"""What is trained: one package a task, on top of the core, which knows none of them."""

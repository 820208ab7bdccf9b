"""Image reading that several tasks share."""

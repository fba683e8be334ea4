"""What needs catalog and store together: publish, import, register in bulk, maintain."""

"""What `contratile doctor` examines."""

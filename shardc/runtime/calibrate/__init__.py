"""What a machine takes, measured, and written as a file of hardware."""

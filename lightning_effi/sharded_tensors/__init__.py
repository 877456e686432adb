"""What torch functions do with sharded parameters in code that was written for plain ones."""

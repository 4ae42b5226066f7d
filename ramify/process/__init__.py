"""What this process does about itself."""

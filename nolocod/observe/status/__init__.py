"""What a node tells about itself: its state as JSON, the HTTP pages, and tables for the terminal."""

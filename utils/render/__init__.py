"""What people read, as blocks that are rendered as text or as a page; the report and every tool build on it."""

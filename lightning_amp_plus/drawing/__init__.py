"""Pictures, and the page that holds them. Needs matplotlib, which only a picture loads."""

"""What people look at: tables, pages, figures, a live view."""

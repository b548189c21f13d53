"""Own data by declaration: image folders, tables, arrays."""

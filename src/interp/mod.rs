//! Running a function of a program.

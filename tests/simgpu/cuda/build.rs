//! Gives the library the name applications load it under.
fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    // As the real library: calls between its own functions do not go through the dynamic linker.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-Bsymbolic");
}

// Needs one layer and the layers below it: links without the loader.

#include <iostream>

#include <pinflow/formats/npy.hpp>

int main() {
    std::cout << pinflow::format_npy_header(pinflow::dtype::of<float>(), pinflow::shape_vector{2, 3});
}

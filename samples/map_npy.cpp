// map_npy FILE.npy: opens an array where it lies, says what it is, and looks at a few of its elements.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <exception>

#include "pinflow/pinflow.hpp"

namespace {

/// The mean of up to 1000 elements, spread over the array. Only the pages that they lie on are read from the
/// disk, however large the file is.
template <typename T>
void print_mean(const pinflow::array_view& view) {
    const T* const elements =
        view.as<T>();  // throws unless the elements are of type T, in C order and aligned
    const std::uint64_t count = std::min<std::uint64_t>(view.size(), 1000);
    const std::uint64_t step = view.size() / count;
    double sum = 0;
    for (std::uint64_t index = 0; index < count; ++index)
        sum += static_cast<double>(elements[index * step]);
    std::printf("mean of %ju elements: %g\n", static_cast<std::uintmax_t>(count),
                sum / static_cast<double>(count));
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 2) {
        std::fprintf(stderr, "usage: map_npy FILE.npy\n");
        return 2;
    }
    try {
        // reads the header and maps the rest: the same time for a kilobyte and for a terabyte
        const pinflow::array array = pinflow::open_npy(argv[1]);
        std::printf("dtype:  %s\n", array.dtype().descr().c_str());
        std::printf("shape:  %s\n", pinflow::to_string(array.shape()).c_str());
        std::printf("mapped: %s (%s)\n", array.mapped() ? "yes" : "no", array.reason().c_str());

        if (!array.mapped() || array.size_bytes() == 0) return 0;
        const pinflow::array_view& view = array.view();
        if (!view.c_contiguous()) {
            std::printf("the elements lie in Fortran order\n");
        } else if (view.dtype() == pinflow::dtype::of<float>()) {
            print_mean<float>(view);
        } else if (view.dtype() == pinflow::dtype::of<double>()) {
            print_mean<double>(view);
        } else if (view.dtype() == pinflow::dtype::of<std::uint8_t>()) {
            print_mean<std::uint8_t>(view);
        } else if (view.dtype() == pinflow::dtype::of<std::int64_t>()) {
            print_mean<std::int64_t>(view);
        }
        return 0;
    } catch (const std::exception& failure) {
        std::fprintf(stderr, "map_npy: error: %s\n", failure.what());
        return 1;
    }
}

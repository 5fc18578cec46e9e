// open_any FILE[:NAME]: opens an array of any format, prints its type, its shape and whether it is mapped,
// and for some types the mean of a few elements. Without NAME, a file of several arrays is listed.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <string>

#include "pinflow/pinflow.hpp"

namespace {

/// The mean of up to 1000 elements, spread over the array. If it is mapped, the kernel reads their pages and
/// those around them.
template <typename T>
void print_mean(const pinflow::array_view& view) {
    const std::uint64_t count = std::min<std::uint64_t>(view.size(), 1000);
    const std::uint64_t step = view.size() / count;
    double sum = 0;
    for (std::uint64_t index = 0; index < count; ++index) {
        T element;  // `view.as<T>()` needs aligned data, and data in an .npz file seldom is aligned
        std::memcpy(&element, view.data() + index * step * sizeof(T), sizeof(T));
        sum += static_cast<double>(element);
    }
    std::printf("mean of %ju elements: %g\n", static_cast<std::uintmax_t>(count),
                sum / static_cast<double>(count));
}

void print_elements(const pinflow::array_view& view) {
    if (view.size_bytes() == 0) return;
    if (!view.c_contiguous()) {
        std::printf("the elements are not in C order: `pinflow convert` rewrites them in C order\n");
    } else if (view.dtype() == pinflow::dtype::of<float>()) {
        print_mean<float>(view);
    } else if (view.dtype() == pinflow::dtype::of<double>()) {
        print_mean<double>(view);
    } else if (view.dtype() == pinflow::dtype::of<std::uint8_t>()) {
        print_mean<std::uint8_t>(view);
    } else if (view.dtype() == pinflow::dtype::of<std::int64_t>()) {
        print_mean<std::int64_t>(view);
    }
}

void print_list(const std::string& path) {
    for (const pinflow::array_listing& each : pinflow::list_arrays(path)) {
        std::printf("%s: %s %s, %s\n", each.name.c_str(),
                    each.dtype ? each.dtype->descr().c_str() : "cannot be opened",
                    pinflow::to_string(each.shape).c_str(), each.reason.c_str());
    }
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 2) {
        std::fprintf(stderr, "usage: open_any FILE[:NAME]\n");
        return 2;
    }
    try {
        const auto [path, name, named] = pinflow::split_file_and_name(argv[1]);
        if (!named && pinflow::list_arrays(path).size() != 1) {
            print_list(path);
            return 0;
        }
        // maps the array, in the same time for a kilobyte and for a terabyte. Compressed arrays and HDF5
        // datasets that are not contiguous are read into memory as a whole instead
        const pinflow::array array = named ? pinflow::open(path, name) : pinflow::open(path);
        std::printf("dtype:  %s\n", array.dtype().descr().c_str());
        std::printf("shape:  %s\n", pinflow::to_string(array.shape()).c_str());
        std::printf("mapped: %s (%s)\n", array.is_mapped() ? "yes" : "no", array.reason().c_str());
        if (array.has_view()) print_elements(array.view());
        return 0;
    } catch (const std::exception& failure) {
        std::fprintf(stderr, "open_any: error: %s\n", failure.what());
        return 1;
    }
}

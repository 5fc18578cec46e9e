// Writes an array to the path given, opens it, and streams it through a loader on the host device.

#include <cstddef>
#include <cstdint>
#include <iostream>
#include <span>
#include <vector>

#include <pinflow/pinflow.hpp>

int main(int argc, char** argv) try {
    if (argc != 2) {
        std::cerr << "usage: consumer FILE.npy\n";
        return 2;
    }
    std::vector<std::int32_t> values(12 * 5);
    std::int64_t expected = 0;
    for (std::size_t i = 0; i < values.size(); ++i) {
        values[i] = static_cast<std::int32_t>(i * i);
        expected += values[i];
    }
    pinflow::write_npy(argv[1], pinflow::array_view(std::as_bytes(std::span(values)).data(),
                                                    pinflow::dtype::of<std::int32_t>(), {12, 5}));

    pinflow::loader loader(
        {pinflow::open_npy(argv[1])},
        {.device = pinflow::device::host(), .batch_rows = 5, .order = pinflow::order::shuffled});
    std::int64_t sum = 0;
    while (const auto batch = loader.next()) {
        for (const std::int32_t value : batch->on_host<std::int32_t>(0))
            sum += value;
    }
    std::cout << "pinflow " << pinflow::version << ": sum " << sum << ", expected " << expected << '\n';
    return sum == expected ? 0 : 1;
} catch (const pinflow::error& error) {
    std::cerr << error.what() << '\n';
    return 1;
}

#include <doctest/doctest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "pinflow/formats/listing.hpp"
#include "pinflow/formats/npy.hpp"
#include "pinflow/formats/npz.hpp"
#include "pinflow/formats/safetensors.hpp"
#include "pinflow/shared/segment.hpp"
#include "tests/cli_helpers.hpp"
#include "tests/run_tool.hpp"
#include "tests/support/arrays.hpp"
#include "tests/support/file_bytes.hpp"
#include "tests/support/temporary_folder.hpp"

using namespace pinflow;

namespace {

/// A name in the user's own folder of segments, of this process only. The destructor removes what
/// has that name.
class own_segment {
 public:
    explicit own_segment(const std::string& name)
        : name_("pinflow-test-" + std::to_string(::getpid()) + "-" + name) {}
    own_segment(const own_segment&) = delete;
    own_segment& operator=(const own_segment&) = delete;
    ~own_segment() { run_tool({"unpin", name_}); }

    const std::string& name() const { return name_; }
    std::string file() const { return "shm:" + name_; }

 private:
    std::string name_;
};

std::string digest_of_stream(const std::vector<std::string>& files) {
    std::vector<std::string> arguments{"stream", "--json", "--device", "host"};
    arguments.insert(arguments.end(), files.begin(), files.end());
    const tool_result result = run_tool(arguments);
    CHECK(result.status == 0);
    CHECK(result.errors.empty());
    return result.status == 0 ? nlohmann::json::parse(result.output)["digest"].get<std::string>() : "";
}

}  // namespace

TEST_CASE("pin: stream, inspect, verify and convert open the copy as shm:NAME") {
    const temporary_folder folder;
    const own_segment segment("a");
    const std::string path = folder / "a.npy";
    write_npy(path, numbered_rows(1000, 5).view());
    const tool_result pinned = run_tool({"pin", path, segment.name()});
    CHECK(pinned.status == 0);
    CHECK(pinned.errors.empty());
    CHECK(contains_all(pinned.output, {segment.file(), "(1000, 5)", "GB/s"}));
    CHECK(digest_of_stream({segment.file()}) == digest_of_stream({path}));
    CHECK(digest_of_stream({segment.file(), path}) == digest_of_stream({path, path}));

    const tool_result inspected = run_tool({"inspect", segment.file(), "--json"});
    CHECK(inspected.status == 0);
    const auto object = nlohmann::json::parse(inspected.output);
    CHECK(object["shape"] == std::vector<int>{1000, 5});
    CHECK(object["offset_bytes"] == 4096);
    CHECK(object["mappable"] == true);

    CHECK(run_tool({"verify", segment.file()}).output == segment.file() + ": OK\n");
    const std::string converted = folder / "b.npy";
    CHECK(run_tool({"convert", segment.file(), converted}).status == 0);
    CHECK(digest_of_stream({converted}) == digest_of_stream({path}));

    const tool_result again = run_tool({"pin", path, segment.name()});
    CHECK(again.status == 1);
    CHECK(again.one_error_line());
    CHECK(contains(again.errors, "it exists"));
    CHECK(run_tool({"pin", path, segment.file(), "--replace"}).status == 0);
    CHECK(run_tool({"unpin", segment.name()}).status == 0);
    const tool_result gone = run_tool({"stream", segment.file()});
    CHECK(gone.status == 1);
    CHECK(gone.one_error_line());
    CHECK(contains(gone.errors, "there is no segment"));
}

TEST_CASE("pin: the name of a segment may begin with a bracket") {
    const temporary_folder folder;
    const std::string path = folder / "a.npy";
    write_npy(path, numbered_rows(10, 5).view());
    const std::string name = "[pinflow-test-" + std::to_string(::getpid()) + "]";
    const tool_result pinned = run_tool({"pin", path, name});
    CHECK(pinned.errors.empty());
    CHECK(digest_of_stream({"shm:" + name}) == digest_of_stream({path}));
    CHECK(run_tool({"unpin", name}).status == 0);
    CHECK(run_tool({"unpin", name}).status == 1);
}

TEST_CASE("pin: the arrays of a file become NAME/ARRAY, and list names them") {
    const temporary_folder folder;
    const own_segment segment("set");
    const std::string path = folder / "set.npz";
    {
        npz_writer writer(path);
        for (const char* const name : {"images", "labels"}) {
            const array numbers = numbered_rows(100, name[0] == 'i' ? 6 : 1);
            writer.begin(name, numbers.dtype(), numbers.shape());
            writer.write({numbers.view().data(), numbers.size_bytes()});
        }
        writer.finish();
    }
    CHECK(run_tool({"pin", path, segment.name()}).status == 0);
    CHECK(digest_of_stream({segment.file() + "/images", segment.file() + "/labels"}) ==
          digest_of_stream({path + ":images", path + ":labels"}));
    const tool_result whole = run_tool({"inspect", segment.file()});
    CHECK(whole.status == 0);
    CHECK(contains_all(whole.output, {"images", "labels", "(100, 6)"}));
    const tool_result unnamed = run_tool({"stream", segment.file()});
    CHECK(unnamed.status == 1);
    CHECK(contains(unnamed.errors, "NAME/ARRAY"));

    const tool_result listed = run_tool({"list", "--json"});
    CHECK(listed.status == 0);
    std::vector<std::string> names;
    const auto object = nlohmann::json::parse(listed.output);
    for (const auto& each : object["segments"]) {
        const auto name = each["name"].get<std::string>();
        if (!name.starts_with(segment.name())) continue;
        names.push_back(name);
        CHECK(each["problem"].is_null());
        CHECK(each["dtype"] == "<u8");
        CHECK(each["checksum"].get<std::string>().size() == 32);
    }
    CHECK(names == std::vector<std::string>{segment.name() + "/images", segment.name() + "/labels"});
    const tool_result text = run_tool({"list"});
    CHECK(contains_all(text.output, {segment.name() + "/images", "(100, 6)"}));

    const own_segment one("one");
    CHECK(run_tool({"pin", path + ":labels", one.name()}).status == 0);
    CHECK(digest_of_stream({one.file()}) == digest_of_stream({path + ":labels"}));
}

TEST_CASE("pin: a file with many arrays takes one descriptor for each") {
    const temporary_folder folder;
    const own_segment segment("many");
    const std::string path = folder / "many.safetensors";
    std::vector<safetensors_writer::tensor> tensors;
    std::vector<float> values;
    for (int i = 0; i < 300; ++i) {
        tensors.push_back({"t" + std::to_string(i), dtype::of<float>(), {1}});
        values.push_back(static_cast<float>(i));
    }
    safetensors_writer writer(path, tensors);
    writer.write(std::as_bytes(std::span(values)));
    writer.finish();
    tool_surroundings surroundings;
    surroundings.max_descriptors = 400;
    const tool_result pinned = run_tool({"pin", path, segment.name()}, surroundings);
    CHECK(pinned.status == 0);
    CHECK(pinned.errors == "");
    for (const std::string name : {"t0", "t17", "t299"}) {
        const array opened = open_segment(segment.name() + "/" + name);
        CHECK(*reinterpret_cast<const float*>(opened.view().data()) == std::stof(name.substr(1)));
    }
}

TEST_CASE("list: a file that is no segment is not counted as one") {
    const temporary_folder folder;
    const own_segment segment("good"), other("other");
    write_npy(folder / "a.npy", numbered_rows(10).view());
    REQUIRE(run_tool({"pin", folder / "a.npy", segment.name()}).status == 0);
    const std::filesystem::path stray = segment_folder() / other.name();
    write_bytes(stray, std::as_bytes(std::span("no segment")));
    const tool_result listed = run_tool({"list"});
    std::filesystem::remove(stray);
    CHECK(listed.status == 0);
    CHECK(contains_all(listed.output, {segment.name(), other.name(), " with a problem, "}));
}

TEST_CASE("pin: a pattern is one array, and with --stack each file is a row") {
    const temporary_folder folder;
    const own_segment rows("rows");
    const own_segment stacked("stacked");
    for (int i = 0; i < 12; ++i)
        write_npy(folder / ("part-" + std::to_string(i) + ".npy"), numbered_rows(3, 4).view());
    const std::string pattern = folder / "part-*.npy";
    CHECK(run_tool({"pin", pattern, rows.name()}).status == 0);
    CHECK(run_tool({"pin", pattern, stacked.name(), "--stack"}).status == 0);
    CHECK(open_segment(rows.name()).shape() == shape_vector{36, 4});
    CHECK(open_segment(stacked.name()).shape() == shape_vector{12, 3, 4});
    CHECK(digest_of_stream({rows.file()}) == digest_of_stream({pattern}));
}

TEST_CASE("pin: a member of a .npz file whose CRC-32 does not fit is refused") {
    const temporary_folder folder;
    const own_segment segment("crc");
    const std::string path = folder / "a.npz";
    const array rows = numbered_rows(1000);
    {
        npz_writer writer(path);
        writer.begin("a", rows.dtype(), rows.shape());
        writer.write({rows.view().data(), rows.size_bytes()});
        writer.finish();
    }
    const auto data_begin = static_cast<std::size_t>(list_arrays(path).front().offset_bytes.value());
    {
        std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
        file.seekp(static_cast<std::streamoff>(data_begin + 7));
        file.put('x');
    }
    for (const std::string& file : {path, path + ":a"}) {
        const tool_result result = run_tool({"pin", file, segment.name()});
        CHECK(result.status == 1);
        CHECK(result.one_error_line());
        CHECK(result.errors.find("is damaged: its CRC-32 is ") != std::string::npos);
        CHECK(run_tool({"inspect", segment.file()}).status == 1);
    }
}

TEST_CASE("pin: invalid names, missing files and wrong usage are refused") {
    const temporary_folder folder;
    const std::string path = folder / "a.npy";
    write_npy(path, numbered_rows(10).view());
    for (const std::string& name : {std::string(), std::string("."), std::string(".."), std::string("a\nb"),
                                    std::string(300, 'x'), std::string("a/b")}) {
        CAPTURE(name);
        for (const std::vector<std::string>& arguments :
             {std::vector<std::string>{"pin", path, name}, {"unpin", name}, {"stream", "shm:" + name}}) {
            if (name == "a/b" && arguments[0] != "pin") continue;  // the user may have a segment of that name
            const tool_result result = run_tool(arguments);
            CHECK(result.status == (arguments[0] == "stream" ? 1 : 2));
            CHECK(result.one_error_line());
        }
    }
    const tool_result missing = run_tool({"pin", folder / "none.npy", "x"});
    CHECK(missing.status == 1);
    CHECK(missing.one_error_line());
    CHECK(run_tool({"pin", path}).status == 2);
    CHECK(run_tool({"verify", "--write", "shm:x"}).status == 2);
    CHECK(run_tool({"list", "more"}).status == 2);
    CHECK(run_tool({"clean", "more"}).status == 2);
}

TEST_CASE("pin: types that .npy has no name for, arrays without axes and in Fortran order come back") {
    const temporary_folder folder;
    const own_segment floats("floats");
    const std::string path = folder / "a.safetensors";
    {
        const safetensors_writer::tensor tensor{"weights", dtype::parse("bfloat16"), {4, 2}};
        safetensors_writer writer(path, std::span(&tensor, 1));
        const std::vector<std::byte> ones(16, std::byte{0x3F});
        writer.write(ones);
        writer.finish();
    }
    CHECK(run_tool({"pin", path + ":weights", floats.name()}).status == 0);
    CHECK(contains(run_tool({"inspect", floats.file()}).output, "bfloat16"));
    const std::string converted = folder / "b.npy";
    CHECK(run_tool({"convert", floats.file(), converted, "--dtype", "float32"}).status == 0);
    CHECK(open_npy(converted).dtype() == dtype::of<float>());

    const own_segment fortran("fortran");
    const std::string fortran_path = folder / "f.npy";
    const std::vector<float> elements{0, 1, 2, 3, 4, 5};
    write_npy(fortran_path, array_view(reinterpret_cast<const std::byte*>(elements.data()),
                                       dtype::of<float>(), {2, 3}, {4, 8}));
    CHECK(run_tool({"pin", fortran_path, fortran.name()}).status == 0);
    const array straight = open_segment(fortran.name());
    CHECK(straight.shape() == shape_vector{2, 3});
    CHECK(std::vector<float>(straight.view().as<float>(), straight.view().as<float>() + 6) ==
          std::vector<float>{0, 2, 4, 1, 3, 5});

    const own_segment scalar("scalar");
    const std::string scalar_path = folder / "s.npy";
    write_npy(scalar_path,
              array_view(reinterpret_cast<const std::byte*>(elements.data() + 3), dtype::of<float>(), {}));
    CHECK(run_tool({"pin", scalar_path, scalar.name()}).status == 0);
    CHECK(open_segment(scalar.name()).view().as<float>()[0] == 3);
}

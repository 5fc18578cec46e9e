#include <doctest/doctest.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "pinflow/error.hpp"
#include "pinflow/formats/safetensors.hpp"
#include "tests/fuzz/safetensors_header_invariants.hpp"
#include "tests/npy_bytes.hpp"
#include "tests/safetensors_bytes.hpp"
#include "tests/support/file_bytes.hpp"
#include "tests/support/sanitized.hpp"

namespace {

using npy_bytes::as_bytes;
using pinflow::dtype;
using pinflow::dtype_kind;
using pinflow::shape_vector;
using safetensors_bytes::eight_bytes;
using safetensors_bytes::entry;
using safetensors_bytes::file_of;
using safetensors_bytes::named_types;
using safetensors_bytes::only;
using safetensors_bytes::parsed;

std::string refusal(const std::string& file) {
    return message_of<pinflow::format_error>([&] { parsed(file); });
}

std::string repeated(const std::string& part, std::size_t count) {
    std::string result;
    for (std::size_t index = 0; index < count; ++index)
        result += part;
    return result;
}

}  // namespace

// ---- what is accepted -------------------------------------------------------------------------------------

TEST_CASE("safetensors header: reads names, types, shapes and places, in the order of the data") {
    const std::string json = R"({"z":{"dtype":"F64","shape":[1],"data_offsets":[8,16]},)"
                             R"("__metadata__":{"format":"pt","n":""},)"
                             R"("a":{"data_offsets":[0,8],"shape":[2,2],"dtype":"BF16"}}   )";
    const auto header = parsed(file_of(json, std::string(16, 'x')));
    REQUIRE(header.tensors.size() == 2);
    const std::uint64_t data = 8 + json.size();
    CHECK(header.tensors[0] == pinflow::safetensors_entry{"a", "BF16", dtype(dtype_kind::bfloat16, 2),
                                                          shape_vector{2, 2}, data, 8});
    CHECK(header.tensors[1] ==
          pinflow::safetensors_entry{"z", "F64", dtype::of<double>(), shape_vector{1}, data + 8, 8});
    CHECK(header.metadata == std::map<std::string, std::string>{{"format", "pt"}, {"n", ""}});
}

TEST_CASE("safetensors header: knows every type of the format, and names those that pinflow lacks") {
    for (const auto& [name, type] : named_types()) {
        CAPTURE(name);
        const auto size = type.size_bytes() * 8;
        const auto header = parsed(file_of(only(name, "[2,4]", fmt::format("[0,{}]", size)),
                                           std::string(static_cast<std::size_t>(size), 'x')));
        REQUIRE(header.tensors.size() == 1);
        CHECK(header.tensors[0].dtype == type);
        CHECK(header.tensors[0].type_name == name);
    }
    for (const auto& [name, bits] :
         std::map<std::string, std::size_t>{{"F4", 4}, {"F6_E2M3", 6}, {"F6_E3M2", 6}}) {
        CAPTURE(name);
        const auto header =
            parsed(file_of(only(name, "[2,4]", fmt::format("[0,{}]", bits)), std::string(bits, 'x')));
        REQUIRE(header.tensors.size() == 1);
        CHECK_FALSE(header.tensors[0].dtype.has_value());
        CHECK(header.tensors[0].size_bytes == bits);
    }
}

TEST_CASE("safetensors header: accepts unusual but valid headers") {
    const std::string scalar = entry("a", "U8", "[]", "[0,1]");
    const std::vector<std::pair<std::string, std::string>> table{
        {"no tensors", file_of("{}")},
        {"metadata alone", file_of(R"({"__metadata__":{"a":"b"}})")},
        {"no metadata", file_of(R"({"__metadata__":null})")},
        {"scalar", file_of("{" + scalar + "}", "x")},
        {"empty tensor", file_of(only("F32", "[0,3]", "[0,0]"))},
        {"empty tensors around one", file_of("{" + entry("e", "U8", "[0]", "[1,1]") + "," + scalar + "," +
                                                 entry("f", "U8", "[0]", "[0,0]") + "}",
                                             "x")},
        {"64 axes", file_of(only("U8", "[" + repeated("1,", 63) + "1]", "[0,1]"), "x")},
        {"line ends after it", file_of("{" + scalar + "}\n\t \r\n", "x")},
        {"spaces within", file_of("{ \n\"a\" : { \"dtype\" : \"U8\" , \"shape\":[ ],"
                                  "\"data_offsets\" : [ 0 , 1 ] } }",
                                  "x")},
        {"unknown keys", file_of(R"({"a":{"x":[1,{"shape":-1.5}],"dtype":"U8","y":null,"shape":[],)"
                                 R"("z":{"dtype":[]},"data_offsets":[0,1],"x":true}})",
                                 "x")},
        {"as deep as the reference goes",
         file_of(R"({"a":{"dtype":"U8","shape":[],"data_offsets":[0,1],"x":)" + repeated("[", 125) +
                     repeated("]", 125) + "}}",
                 "x")},
        {"a name like a field", file_of("{" + entry("dtype", "U8", "[]", "[0,1]") + "}", "x")},
        {"an empty name", file_of("{" + entry("", "U8", "[]", "[0,1]") + "}", "x")},
    };
    for (const auto& [what, file] : table) {
        CAPTURE(what);
        CHECK(refusal(file) == "");
    }
    const auto names = parsed(file_of(R"({"\u00e9\ud83d\ude00\n\u0000":{"dtype":"U8","shape":[],)"
                                      R"("data_offsets":[0,1]}})",
                                      "x"));
    CHECK(names.tensors[0].name == std::string("\xc3\xa9\xf0\x9f\x98\x80\n\0", 8));
}

// ---- what is refused --------------------------------------------------------------------------------------

TEST_CASE("safetensors header: refuses every bad header with one sentence that says what is wrong") {
    const std::string one = entry("a", "U8", "[2]", "[0,2]");
    const std::string nul("\0", 1);
    const auto with = [&](const std::string& more) {
        return file_of(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],)" + more + "}}", "x");
    };
    struct bad_file {
        std::string what;
        std::string file;
        std::string sentence;  ///< a part of it
    };
    const std::vector<bad_file> table{
        // the length
        {"empty file", "", "ends after 0 bytes"},
        {"seven bytes", "\2" + std::string(6, '\0'), "ends after 7 bytes"},
        {"no JSON", eight_bytes(0), "does not begin with '{'"},
        {"no JSON but data", eight_bytes(0) + "{}", "does not begin with '{'"},
        {"length past the end", eight_bytes(3) + "{}", "given as 3 bytes, but only 2 follow"},
        {"length 2^64-1", eight_bytes(~std::uint64_t{0}) + "{}", "18446744073709551615 bytes"},
        {"length 2^64-8", eight_bytes(~std::uint64_t{7}) + "{}", "only 2 follow"},
        {"length 2^63", eight_bytes(std::uint64_t{1} << 63) + "{}", "only 2 follow"},
        // JSON
        {"list", file_of("[]"), "does not begin with '{'"},
        {"space first", file_of(" {}"), "does not begin with '{'"},
        {"byte order mark", file_of("\xef\xbb\xbf{}"), "does not begin with '{'"},
        {"NUL after it", file_of("{}" + nul), "not valid JSON at byte 3"},
        {"NUL and a second one after it", file_of("{" + one + "}" + nul + "{}", "xx"), "not valid JSON"},
        {"text after it", file_of("{}x"), "not valid JSON at byte 3"},
        {"comment", file_of("{}//"), "not valid JSON"},
        {"unclosed", file_of("{" + one, "xx"), "not valid JSON"},
        {"unclosed text", file_of("{\"a"), "not valid JSON"},
        {"comma at the end", file_of("{" + one + ",}", "xx"), "not valid JSON"},
        {"single quotes", file_of("{'a':{}}"), "not valid JSON"},
        {"bare word", file_of("{\"a\":NaN}"), "not valid JSON"},
        {"leading zero", file_of(only("U8", "[01]", "[0,1]"), "x"), "not valid JSON"},
        {"control character", file_of("{\"\x01\":1}"), "not valid JSON at byte 3"},
        {"bad UTF-8", file_of("{\"\xff\":1}"), "not valid JSON at byte 3"},
        {"surrogate in UTF-8", file_of("{\"\xed\xa0\x80\":1}"), "not valid JSON"},
        {"half a surrogate pair", file_of(R"({"\ud800":1})"), "not valid JSON"},
        {"huge float", with("\"x\":1e999"), "not valid JSON"},
        {"10^4 brackets", with("\"x\":" + repeated("[", 10'000)), "nested more than 127 deep"},
        {"10^6 objects", with("\"x\":" + repeated("{\"x\":", 1'000'000)), "nested more than 127 deep"},
        {"a little too deep", with("\"x\":" + repeated("[", 126) + repeated("]", 126)), "nested more than"},
        {"10^5 digits", file_of(only("U8", "[" + repeated("9", 100'000) + "]", "[0,1]"), "x"),
         "not valid JSON"},
        // the header's parts
        {"number for a tensor", file_of("{\"a\":1}"), "has a number for 'a'"},
        {"null for a tensor", file_of("{\"a\":null}"), "has null for 'a'"},
        {"string for a tensor", file_of("{\"a\":\"U8\"}"), "has a string for 'a'"},
        {"boolean for a tensor", file_of("{\"a\":true}"), "has a boolean for 'a'"},
        {"list for a tensor", file_of(R"({"a":["U8",[1],[0,1]]})", "x"), "has an array for 'a'"},
        {"list for metadata", file_of(R"({"__metadata__":[]})"), "has an array for '__metadata__'"},
        {"number in metadata", file_of(R"({"__metadata__":{"a":1}})"), "__metadata__ has a number for 'a'"},
        {"object in metadata", file_of(R"({"__metadata__":{"a":{}}})"), "__metadata__ has an object for 'a'"},
        {"null in metadata", file_of(R"({"__metadata__":{"a":null}})"), "__metadata__ has null for 'a'"},
        {"metadata twice", file_of(R"({"__metadata__":{},"__metadata__":{}})"), "__metadata__ twice"},
        {"metadata null twice", file_of(R"({"__metadata__":null,"__metadata__":{}})"), "__metadata__ twice"},
        {"a string twice", file_of(R"({"__metadata__":{"a":"b","a":"b"}})"), "two strings named 'a'"},
        {"a tensor twice", file_of("{" + one + "," + one + "}", "xx"), "two tensors named 'a'"},
        {"a tensor twice, another between",
         file_of("{" + one + "," + entry("b", "U8", "[0]", "[1,1]") + "," + entry("a", "U8", "[1]", "[1,2]") +
                     "}",
                 "xx"),
         "two tensors named 'a'"},
        {"an empty tensor twice",
         file_of("{" + entry("b", "U8", "[0]", "[0,0]") + "," + entry("b", "I8", "[0]", "[0,0]") + "}"),
         "two tensors named 'b'"},
        {"dtype twice", with(R"("dtype":"U8")"), "gives the dtype of the tensor 'a' twice"},
        {"shape twice", with(R"("shape":[1])"), "gives the shape of the tensor 'a' twice"},
        {"offsets twice", with(R"("data_offsets":[0,1])"), "gives the data_offsets of the tensor 'a' twice"},
        {"no dtype", file_of(R"({"a":{"shape":[1],"data_offsets":[0,1]}})", "x"), "lacks the dtype"},
        {"no shape", file_of(R"({"a":{"dtype":"U8","data_offsets":[0,1]}})", "x"), "lacks the shape"},
        {"no offsets", file_of(R"({"a":{"dtype":"U8","shape":[1]}})", "x"), "lacks the data_offsets"},
        {"nothing of a tensor", file_of(R"({"a":{}})"), "lacks the dtype of the tensor 'a'"},
        // types
        {"unknown type", file_of(only("F12", "[1]", "[0,1]"), "x"), "unknown type 'F12'"},
        {"lower case type", file_of(only("f32", "[1]", "[0,4]"), "xxxx"), "unknown type 'f32'"},
        {"numpy's type", file_of(only("<f4", "[1]", "[0,4]"), "xxxx"), "unknown type '<f4'"},
        {"no type", file_of(only("", "[1]", "[0,1]"), "x"), "unknown type ''"},
        {"type by number", file_of(R"({"a":{"dtype":1,"shape":[1],"data_offsets":[0,1]}})", "x"),
         "has a number in the dtype of the tensor 'a', which should be a string"},
        {"type by map", file_of(R"({"a":{"dtype":{"U8":null},"shape":[1],"data_offsets":[0,1]}})", "x"),
         "has an object in the dtype"},
        // shapes
        {"shape -1", file_of(only("U8", "[-1]", "[0,1]"), "x"), "has a negative number in the shape"},
        {"shape -0", file_of(only("U8", "[-0]", "[0,0]")), "has -0 in the shape"},
        {"shape 1.0", file_of(only("U8", "[1.0]", "[0,1]"), "x"), "a fraction or an exponent"},
        {"shape 1e0", file_of(only("U8", "[1e0]", "[0,1]"), "x"), "a fraction or an exponent"},
        {"shape 2^64", file_of(only("U8", "[18446744073709551616]", "[0,1]"), "x"), "more than 64 bits"},
        {"shape \"1\"", file_of(only("U8", "[\"1\"]", "[0,1]"), "x"), "has a string in the shape"},
        {"shape true", file_of(only("U8", "[true]", "[0,1]"), "x"), "has a boolean in the shape"},
        {"shape null", file_of(only("U8", "null", "[0,1]"), "x"), "has null in the shape"},
        {"shape 1", file_of(only("U8", "1", "[0,1]"), "x"), "has a number in the shape"},
        {"shape [[1]]", file_of(only("U8", "[[1]]", "[0,1]"), "x"), "has an array in the shape"},
        {"65 axes", file_of(only("U8", "[" + repeated("1,", 64) + "1]", "[0,1]"), "x"), "more than 64 axes"},
        {"2^64 elements", file_of(only("U8", "[4294967296,4294967296]", "[0,0]")), "too large"},
        {"bytes overflow", file_of(only("F64", "[2305843009213693952]", "[0,0]")), "too large"},
        {"large and empty", file_of(only("U8", "[0,9223372036854775808]", "[0,0]")), "too large"},
        {"overflow before 0", file_of(only("U8", "[9223372036854775808,2,0]", "[0,0]")), "too large"},
        // places
        {"offsets reversed", file_of(only("U8", "[2]", "[2,0]"), "xx"), "run backwards, from 2 to 0"},
        {"one offset", file_of(only("U8", "[2]", "[0]"), "xx"), "not two numbers"},
        {"no offset", file_of(only("U8", "[2]", "[]"), "xx"), "not two numbers"},
        {"three offsets", file_of(only("U8", "[2]", "[0,2,2]"), "xx"), "not two numbers"},
        {"negative offset", file_of(only("U8", "[2]", "[-2,0]"), "xx"),
         "negative number in the data_offsets"},
        {"offsets too near", file_of(only("F32", "[2]", "[0,7]"), std::string(7, 'x')),
         "the tensor 'a' of F32 and shape (2,) takes 8 bytes, but its data_offsets [0, 7] span 7"},
        {"offsets too far", file_of(only("F32", "[2]", "[0,9]"), std::string(9, 'x')), "span 9"},
        {"empty with bytes", file_of(only("F32", "[0]", "[0,4]"), "xxxx"), "takes 0 bytes"},
        {"offsets near 2^64", file_of(only("U8", "[2]", "[18446744073709551613,18446744073709551615]"), "xx"),
         "a hole"},
        {"half a byte", file_of(only("F4", "[3]", "[0,1]"), "x"), "ends within a byte"},
        {"past the end", file_of(only("U8", "[2]", "[0,2]"), "x"),
         "take 2 bytes of data, but the file has 1"},
        {"one byte too many", file_of(only("U8", "[2]", "[0,2]"), "xxx"), "the file has 3"},
        {"data without tensors", file_of("{}", "x"), "take 0 bytes of data, but the file has 1"},
        {"hole in front", file_of(only("U8", "[1]", "[1,2]"), "xx"), "from 0 to 1, where the tensor 'a'"},
        {"hole", file_of("{" + one + "," + entry("b", "U8", "[1]", "[3,4]") + "}", "xxxx"),
         "from 2 to 3, where the tensor 'b' begins"},
        {"overlap", file_of("{" + one + "," + entry("b", "U8", "[2]", "[1,3]") + "}", "xxx"),
         "the tensor 'b' begins at byte 1 of the data, where the tensor 'a' has not ended"},
        {"the same place", file_of("{" + one + "," + entry("b", "U8", "[2]", "[0,2]") + "}", "xx"),
         "the tensor 'b' begins at byte 0"},
        {"empty within another", file_of("{" + one + "," + entry("b", "U8", "[0]", "[1,1]") + "}", "xx"),
         "the tensor 'b' begins at byte 1"},
        {"line ends and colours in names", file_of("{\"a\\n\\u001b[31m\\u00e9\":1}"),
         "for 'a\\n\\x1b[31m\u00e9'"},
    };
    for (const auto& [what, file, part] : table) {
        CAPTURE(what);
        const std::string sentence = refusal(file);
        CAPTURE(sentence);
        CHECK(contains(sentence, part));
        CHECK(sentence.find('\n') == sentence.npos);
        CHECK(sentence.size() < 500);
    }
}

TEST_CASE("safetensors header: refuses a header of more than 100 MB without looking at it") {
    const std::string beginning = eight_bytes(100'000'001) + "{";
    CHECK(contains(message_of<pinflow::format_error>([&] {
                       pinflow::parse_safetensors_header(as_bytes(beginning), std::uint64_t{1} << 40);
                   }),
                   "safetensors allows 100000000"));
    // one that may be that long, but of which little was read
    CHECK(contains(message_of<pinflow::format_error>([&] {
                       pinflow::parse_safetensors_header(as_bytes(eight_bytes(100'000'000) + "{"),
                                                         std::uint64_t{1} << 40);
                   }),
                   "only 9 bytes were read"));
}

// ---- without the metadata ---------------------------------------------------------------------------------

TEST_CASE("safetensors header: is parsed from pieces of any size, without its metadata, to the same result") {
    const std::string value = repeated("\\u00e9\xc3\xa9\\ud83d\\ude00\xf0\x9f\x98\x80\\\\\\\"", 1000);
    const std::string spaces = std::string(3000, ' ') + "\n\t";
    const std::string json = "{\"__metadata__\"" + spaces + ":" + spaces + "{\"a\":\"" + value +
                             "\",\"b\":\"" + value + "\"}," + entry("x", "U8", "[1]", "[0,1]") + spaces + "}";
    const std::string file = file_of(json, "x");
    const auto expected = parsed(file);
    REQUIRE(expected.metadata.size() == 2);
    for (const std::size_t piece_bytes : {1u, 2u, 3u, 7u, 4096u, 1u << 20}) {
        CAPTURE(piece_bytes);
        const auto text = as_bytes(json);
        std::size_t position = 0;
        std::vector<std::byte> piece;  // the next piece overwrites it
        const auto next_piece = [&]() -> std::span<const std::byte> {
            const auto next = text.subspan(position, std::min(piece_bytes, text.size() - position));
            piece.assign(next.begin(), next.end());
            position += piece.size();
            return piece;
        };
        const auto header = pinflow::detail::to_safetensors_header(pinflow::detail::parse_safetensors_text(
            next_piece, 8 + json.size(), file.size(), pinflow::detail::safetensors_metadata::checked));
        CHECK(header.tensors == expected.tensors);
        CHECK(header.metadata.empty());
    }
}

TEST_CASE("safetensors header: a plain header gives the same tensors and errors in parts of any size") {
    std::vector<std::string> entries;
    for (int i = 0; i < 40; ++i) {
        // names with the characters that separate tensors, where the parser divides a header into parts
        const std::string name =
            std::vector<std::string>{"a", "},", "{}", ",", "x},y", ": {"}[static_cast<std::size_t>(i % 6)] +
            std::to_string(i);
        const std::string at = std::to_string(4 * i) + (i % 3 == 0 ? " , " : ",") + std::to_string(4 * i + 4);
        entries.push_back(entry(name, "F32", "[1]", "[" + at + "]"));
    }
    const std::string metadata = R"("__metadata__":{"format":"pt","b},":"c},"})";
    const auto outcome_of = [&](const std::string& json, std::size_t part_bytes) {
        const std::string file = file_of(json, std::string(160, 'x'));
        return safetensors_header_invariants::outcome_of([&] {
            return pinflow::detail::to_safetensors_header(pinflow::detail::parse_safetensors_bytes(
                as_bytes(file), file.size(), pinflow::detail::safetensors_metadata::kept, part_bytes));
        });
    };
    const auto with = [&](std::size_t index, std::string text) {
        std::vector<std::string> changed = entries;
        changed.insert(changed.begin() + static_cast<std::ptrdiff_t>(index), metadata);
        changed[39] = std::move(text);
        return changed;
    };
    std::vector<std::string> two_types = with(0, entry("p", "F99", "[1]", "[152,156]"));
    two_types[21] = entry("q", "F98", "[1]", "[80,84]");
    for (const std::string_view comma : {",", " ,\n ", ", "}) {
        for (const auto& [parts, error] : std::vector<std::pair<std::vector<std::string>, std::string>>{
                 {with(0, entries[38]), ""},
                 {with(17, entries[38]), ""},
                 {with(20, metadata), "__metadata__ twice"},
                 {with(20, entry("a0", "F32", "[1]", "[152,156]")), "two tensors named 'a0'"},
                 {two_types, "'F98'"},
                 {with(0, entries[38] + "}"), "not valid JSON"}}) {
            CAPTURE(error);
            const std::string json = fmt::format("{{{}}}", fmt::join(parts, comma));
            const auto whole = outcome_of(json, std::size_t{1} << 20);
            CHECK(whole.error.empty() == error.empty());
            CHECK(contains(whole.error, error));
            for (std::size_t part_bytes = 1; part_bytes < 300; part_bytes += 1 + part_bytes / 4) {
                CAPTURE(part_bytes);
                const auto cut = outcome_of(json, part_bytes);
                CHECK(cut.error == whole.error);
                CHECK(cut.header.tensors == whole.header.tensors);
                CHECK(cut.header.metadata == whole.header.metadata);
                if (!error.empty()) continue;
                CHECK(pinflow::detail::parse_plain_header(json, part_bytes).has_value());
            }
        }
    }
}

TEST_CASE("safetensors header: parts may be cut at metadata like tensors, and may be in any order") {
    std::vector<std::string> entries{R"("__metadata__":{"a},":":{",":x":"y"})"};
    for (int i = 0; i < 20; ++i) {
        const int begin = 4 * (i * 7 % 20);
        entries.push_back(
            entry(fmt::format("t{}", begin), "F32", "[1]", fmt::format("[{},{}]", begin, begin + 4)));
    }
    const auto outcome_of = [](const std::vector<std::string>& parts, std::size_t part_bytes) {
        const std::string file = file_of(fmt::format("{{{}}}", fmt::join(parts, ",")), std::string(80, 'x'));
        return safetensors_header_invariants::outcome_of([&] {
            return pinflow::detail::to_safetensors_header(pinflow::detail::parse_safetensors_bytes(
                as_bytes(file), file.size(), pinflow::detail::safetensors_metadata::kept, part_bytes));
        });
    };
    std::vector<std::string> twice = entries;
    twice[20] = twice[2];
    std::vector<std::string> without_last = entries;
    without_last.pop_back();
    for (std::size_t part_bytes = 1; part_bytes < 100; ++part_bytes) {
        CAPTURE(part_bytes);
        const auto found = outcome_of(entries, part_bytes);
        CHECK(found.header.metadata.size() == 2);
        REQUIRE(found.header.tensors.size() == 20);
        for (std::size_t i = 0; i < 20; ++i)
            CHECK(found.header.tensors[i].name == fmt::format("t{}", 4 * i));
        CHECK(outcome_of(twice, part_bytes).error == "the header has two tensors named 't28'");
        CHECK(contains(outcome_of(without_last, part_bytes).error, "the data has a hole"));
    }
}

TEST_CASE("safetensors header: wrong metadata is refused in the same words, kept or only checked") {
    const auto refusals = [](const std::string& json) {
        const std::string file = file_of(json);
        const auto refused = [&](pinflow::detail::safetensors_metadata wanted) {
            return message_of<pinflow::format_error>(
                [&] { pinflow::detail::parse_safetensors_bytes(as_bytes(file), file.size(), wanted); });
        };
        return std::pair(refused(pinflow::detail::safetensors_metadata::kept),
                         refused(pinflow::detail::safetensors_metadata::checked));
    };
    const std::string beginning = R"({"__metadata__":{"a":")" + std::string(9000, 'x');
    for (const char* const wrong :
         {"\x01", "\xff", "\xc0\x80", "\xed\xa0\x80", "\xf4\x90\x80\x80", "\xe2\x82", "\\x", "\\u12g4",
          "\\ud800", "\\ud800x", "\\ud800\\n", "\\ud800\\ud800", "\\udc00"}) {
        CAPTURE(wrong);
        const auto [kept, checked] = refusals(beginning + wrong + R"(","b":"c"}})");
        CHECK(contains(kept, "not valid JSON at byte 9"));
        // the JSON library counts to the end of an escape, which has 12 characters at most
        const auto byte_of = [](const std::string& message) {
            const std::string before = "not valid JSON at byte ";
            REQUIRE(contains(message, before));
            return std::stoll(message.substr(message.find(before) + before.size()));
        };
        CHECK(std::abs(byte_of(checked) - byte_of(kept)) <= 12);
    }
    // a mistake after a string that is only checked, not kept
    const auto [kept, checked] = refusals(beginning + "\"}   ,   ;}");
    CHECK(contains(kept, "not valid JSON at byte"));
    CHECK(checked == kept);
    CHECK(contains(refusals(beginning).second, "not valid JSON"));
    CHECK(contains(refusals(R"({"__metadata__":{"a":"b","a":"c"}})").second, "two strings of one name"));
    CHECK(refusals(beginning + R"(","b":"c"}})").second.empty());
}

TEST_CASE("safetensors header: strings are checked as the JSON library checks them") {
    std::mt19937_64 random(7);
    const std::vector<std::string> parts{
        "a",       "\xc3", "\xa9",     "\xe2", "\x82", "\xac", "\xed", "\xa0", "\xf0",    "\x9f", "\x98",
        "\x80",    "\xf4", "\x90",     "\\",   "u",    "d83d", "de00", "00e9", "n",       "/",    "\\ud83d",
        "\\ude00", "\x1f", "\xc3\xa9", "\\n",  "\x7f", "\xe0", "\xc1", "\xf5", "\\u00E9", "zz"};
    std::size_t valid = 0;
    for (int repetition = 0; repetition < 200'000; ++repetition) {
        std::string inside;
        for (std::size_t count = random() % 5; count > 0; --count)
            inside += parts[random() % parts.size()];
        pinflow::detail::json_string_check check;
        const bool is_valid =
            std::ranges::all_of(inside, [&](char c) { return check.take(static_cast<unsigned char>(c)); }) &&
            check.may_end();
        valid += is_valid ? 1 : 0;
        if (is_valid != nlohmann::json::accept("\"" + inside + "\"")) FAIL_CHECK(inside);
    }
    CHECK(valid > 10'000);
    CHECK(valid < 150'000);
}

// ---- fuzzing ----------------------------------------------------------------------------------------------

TEST_CASE("safetensors header: the invariants hold for the fuzzer's seeds, findings and their mutations") {
    const auto folder = std::filesystem::path(__FILE__).parent_path() / "fuzz";
    std::size_t files = 0;
    for (const auto& inputs :
         {folder / "seeds" / "safetensors_header", folder / "regressions" / "safetensors_header"}) {
        if (!std::filesystem::exists(inputs)) continue;  // nothing found so far
        for (const auto& file : std::filesystem::directory_iterator(inputs)) {
            CAPTURE(file.path().filename().string());
            std::string bytes = npy_bytes::read_file(file.path().string());
            ++files;
            CHECK(safetensors_header_invariants::broken_for(bytes) == "");
            constexpr std::size_t step = sanitized ? 5 : 1;  // the fuzz targets run under sanitizers, too
            for (std::size_t at = 0; at < bytes.size(); at += step) {
                const char original = bytes[at];
                for (const char replacement : {'\0', ' ', '"', '{', '[', ',', '0', '9', '\\', '\xFF'}) {
                    bytes[at] = replacement;
                    const std::string broken = safetensors_header_invariants::broken_for(bytes);
                    if (!broken.empty()) FAIL_CHECK("byte " << at << ": " << broken);
                }
                bytes[at] = original;
            }
        }
    }
    CHECK(files > 10);
}

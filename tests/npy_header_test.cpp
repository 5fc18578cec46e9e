#include <doctest/doctest.h>

#include <cstdint>
#include <string>

#include "pinflow/formats/npy.hpp"
#include "tests/npy_headers.hpp"
#include "tests/support/file_bytes.hpp"

namespace {

using npy_bytes::header;
using npy_bytes::text;
using pinflow::shape_vector;

}  // namespace

// ---- reading ----------------------------------------------------------------------------------------------

TEST_CASE("npy header: reads what numpy writes") {
    const auto read = parse(header(text("'<f4'", "(2, 3)") + "          \n"));
    CHECK(read.dtype.descr() == "<f4");
    CHECK(read.shape == shape_vector{2, 3});
    CHECK_FALSE(read.fortran_order);
    CHECK(read.data_offset_bytes == 10 + text("'<f4'", "(2, 3)").size() + 11);
}

TEST_CASE("npy header: reads versions 1.0, 2.0 and 3.0") {
    for (const unsigned version : {1u, 2u, 3u}) {
        CAPTURE(version);
        const std::string bytes = header(text("'>i8'", "(7,)", "True") + "\n", version);
        const auto read = parse(bytes);
        CHECK(read.dtype.descr() == ">i8");
        CHECK(read.shape == shape_vector{7});
        CHECK(read.fortran_order);
        CHECK(read.data_offset_bytes == bytes.size());
    }
}

TEST_CASE("npy header: reads the listed spellings of other writers") {
    for (const char* const spelling : {
             "{'descr': 'float32', 'fortran_order': False, 'shape': (2, 3), }",
             R"({"descr": "<f4", "fortran_order": False, "shape": (2, 3), })",
             "{'shape': (2, 3), 'fortran_order': False, 'descr': '<f4'}",
             "{'descr':'<f4','fortran_order':False,'shape':(2,3)}",
             "{ 'descr' : '<f4' , 'fortran_order' : False , 'shape' : ( 2 , 3 , ) , }",
             "{\n'descr':\t'<f4',\n'fortran_order':\tFalse,\n'shape': (2,\n 3),\n}",
             "{'descr': '<f4', 'fortran_order': False, 'shape': (2L, 3L), }",
             "{'descr': '=f4', 'fortran_order': False, 'shape': (2, 3), }",
             "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), } \t \n\n",
         }) {
        CAPTURE(spelling);
        const auto read = parse(header(spelling));
        CHECK(read.dtype.descr() == "<f4");
        CHECK(read.shape == shape_vector{2, 3});
        CHECK_FALSE(read.fortran_order);
    }
}

TEST_CASE("npy header: reads shapes without axes, with one, with empty ones and with 64") {
    CHECK(parse(header(text("'<f4'", "()"))).shape.empty());
    CHECK(parse(header(text("'<f4'", "( )"))).shape.empty());
    CHECK(parse(header(text("'<f4'", "(0,)"))).shape == shape_vector{0});
    CHECK(parse(header(text("'<f4'", "(5, 0, 3)"))).shape == shape_vector{5, 0, 3});
    const std::string ones = repeated("1, ", 64);
    CHECK(parse(header(text("'<f4'", std::string("(").append(ones).append(")")))).shape ==
          shape_vector(64, 1));
}

TEST_CASE("npy header: reads any alignment of the data") {
    for (std::size_t padding = 0; padding < 70; ++padding) {
        const std::string bytes = header(text("'<f8'", "(3,)") + std::string(padding, ' '));
        CHECK(parse(bytes, bytes.size() + 24).data_offset_bytes == bytes.size());
    }
}

TEST_CASE("npy header: the file may continue, but must hold what the header declares") {
    const std::string bytes = header(text("'<f8'", "(16, 32)") + "\n");
    CHECK_NOTHROW(parse(bytes, bytes.size() + 4096));
    CHECK_NOTHROW(parse(bytes, bytes.size() + 4097));
    CHECK(contains_all(refusal(bytes, bytes.size() + 4095), {"header declares 4096 bytes", "file has 4095"}));
    CHECK_NOTHROW(parse(header(text("'<f8'", "(16, 0)")), header(text("'<f8'", "(16, 0)")).size()));
    const std::string scalar = header(text("'<f8'", "()"));
    CHECK_NOTHROW(parse(scalar, scalar.size() + 8));
    CHECK(contains_all(refusal(scalar, scalar.size()), {"header declares 8 bytes", "file has 0"}));
}

TEST_CASE("npy header: the bytes may be a prefix of the file that continues past the header") {
    const std::string bytes = header(text("'<f8'", "(2,)")) + std::string(9, '}');
    CHECK(parse(bytes, any_size).data_offset_bytes == bytes.size() - 9);
}

// ---- structured types -------------------------------------------------------------------------------------

TEST_CASE("npy header: reads structured types as numpy does") {
    struct {
        const char* literal;
        const char* descr;  // as numpy would spell it
        std::uint64_t size_bytes;
    } const cases[] = {
        {"[('a', '<f4'), ('b', '>i8')]", "[('a', '<f4'), ('b', '>i8')]", 12},
        {"[ ( 'a' , '<f4' , ) , ]", "[('a', '<f4')]", 4},
        {"[('a', 'float32')]", "[('a', '<f4')]", 4},
        {"[('a', '<f4', (2, 3))]", "[('a', '<f4', (2, 3))]", 24},
        {"[('a', '<f4', (2, 3,),)]", "[('a', '<f4', (2, 3))]", 24},
        {"[('a', '<f4', 3)]", "[('a', '<f4', (3,))]", 12},
        {"[('a', '<f4', ())]", "[('a', '<f4')]", 4},
        {"[('a', '<f4', (1,))]", "[('a', '<f4', (1,))]", 4},
        {"[('a', '<f4', (0, 2)), ('b', '|i1')]", "[('a', '<f4', (0, 2)), ('b', '|i1')]", 1},
        {"[('a', '<f4', 0), ('b', '|i1')]", "[('a', '<f4', (0,)), ('b', '|i1')]", 1},
        {"[('a', '<f4', (2L, 3L))]", "[('a', '<f4', (2, 3))]", 24},
        {"[(('title', 'name'), '<f4')]", "[(('title', 'name'), '<f4')]", 4},
        {"[((u'title', 'name',), '<f4', 2)]", "[(('title', 'name'), '<f4', (2,))]", 8},
        {"[('a', [('b', [('c', '|S3')], (2,))])]", "[('a', [('b', [('c', '|S3')], (2,))])]", 6},
        {"[('a', '|i1'), ('', '|V7'), ('b', '<f8')]", "[('a', '|i1'), ('', '|V7'), ('b', '<f8')]", 16},
        {"[('', '|V3'), ('a', '|i1'), ('', '|V4')]", "[('', '|V3'), ('a', '|i1'), ('', '|V4')]", 8},
        {"[('', '|V3'), ('', '|V2'), ('a', '|i1')]", "[('', '|V5'), ('a', '|i1')]", 6},
        {"[('', '|V2', (2, 2)), ('a', '|i1')]", "[('', '|V8'), ('a', '|i1')]", 9},
        {"[('', '<f4', (2,)), ('a', '|i1')]", "[('', '|V8'), ('a', '|i1')]", 9},
        {"[('', [('b', '<f4')], (2,)), ('a', '|i1')]", "[('', '|V8'), ('a', '|i1')]", 9},
        {"[('a', '|V4')]", "[('a', '|V4')]", 4},
        {"[('a', '|V2', (2,))]", "[('a', '|V2', (2,))]", 4},
        // arrays of arrays, which are one array of more axes here
        {"[('a', ('<f4', (2,)), (3,))]", "[('a', '<f4', (3, 2))]", 24},
        {"[('a', ('<f4', (2,)))]", "[('a', '<f4', (2,))]", 8},
        {"[('a', (('<f4', 2), (3, 4),), 5)]", "[('a', '<f4', (5, 3, 4, 2))]", 480},
        {"[('a', ('<f4', ()), ())]", "[('a', '<f4')]", 4},
        {"[('a', ([('b', '<f4')], (2,)), (3,))]", "[('a', [('b', '<f4')], (3, 2))]", 24},
    };
    for (const auto& [literal, descr, size_bytes] : cases) {
        CAPTURE(literal);
        const auto read = parse(header(text(literal, "(3,)")));
        CHECK(read.dtype.descr() == descr);
        CHECK(read.dtype.size_bytes() == size_bytes);
        CHECK(read.dtype.kind() == pinflow::dtype_kind::opaque);
    }
    CHECK(parse(header(text(nested(32), "()"))).dtype.size_bytes() == 4);
}

TEST_CASE("npy header: the offset of a field is the sum of the sizes before it") {
    const auto type =
        parse(header(text("[('a', '|S3'), ('', '|V5'), (('t', 'b'), '>f8', (2,)), ('c', [('d', '|u1')])]",
                          "()")))
            .dtype;
    REQUIRE(type.fields().size() == 3);
    CHECK(type.fields()[0].offset_bytes == 0);
    CHECK(type.fields()[1].offset_bytes == 8);
    CHECK(type.fields()[1].title == "t");
    CHECK(type.fields()[1].type == pinflow::dtype::parse(">f8"));
    CHECK(type.fields()[1].shape == shape_vector{2});
    CHECK(type.fields()[2].offset_bytes == 24);
    CHECK(type.fields()[2].type.fields()[0].name == "d");
}

TEST_CASE("npy header: names of fields become UTF-8") {
    struct {
        std::string literal;
        unsigned major_version;
        std::string name;
    } const cases[] = {
        {"'caf\xE9'", 1, "caf\u00e9"},
        {"'caf\xE9'", 2, "caf\u00e9"},
        {"'\xC3\xA9'", 1, "\u00c3\u00a9"},
        {"'\xC3\xA9'", 3, "\u00e9"},
        {"'\xE6\x95\xB0 \xF0\x9F\x98\x80'", 3, "\u6570 \U0001F600"},
        {R"('\xe9\u6570\U0001F600')", 1, "\u00e9\u6570\U0001F600"},
        {R"('\u6570')", 3, "\u6570"},
        {R"('it\'s \"a\" \\ b')", 1, R"(it's "a" \ b)"},
        {R"("it's")", 1, "it's"},
        {R"('\t\n\r\x00\x7F')", 1, std::string("\t\n\r\0\x7F", 5)},
        {R"('\\u6570')", 1, R"(\u6570)"},
    };
    for (const auto& [literal, major_version, name] : cases) {
        CAPTURE(literal);
        const auto read = parse(header(text("[(" + literal + ", '<f4')]", "()"), major_version));
        CHECK(read.dtype.fields()[0].name == name);
        // in whichever version is written, the name is the same
        const auto again = parse(pinflow::format_npy_header(read.dtype, {}));
        CHECK(again.dtype == read.dtype);
    }
}

// ---- writing ----------------------------------------------------------------------------------------------

TEST_CASE("npy header: what is written is aligned and reads back the same") {
    for (const char* const descr : {"<f4", ">i8", "|b1", "|S10", "<U5", "<M8[25us]", "|V7", "<c32"}) {
        for (const shape_vector& shape :
             {shape_vector{}, shape_vector{0}, shape_vector{5}, shape_vector{2, 3},
              shape_vector{123456789, 0, 1}, shape_vector(64, 1), shape_vector{0, any_size / 32}}) {
            for (const std::uint64_t alignment : {16u, 64u, 4096u, 8192u}) {
                for (const bool fortran_order : {false, true}) {
                    const auto type = pinflow::dtype::parse(descr);
                    const std::string bytes =
                        pinflow::format_npy_header(type, shape, fortran_order, alignment);
                    CHECK(bytes.size() % alignment == 0);
                    CHECK(bytes.back() == '\n');
                    const auto read = parse(bytes);
                    CHECK(read.dtype == type);
                    CHECK(read.shape == shape);
                    CHECK(read.fortran_order == fortran_order);
                    CHECK(read.data_offset_bytes == bytes.size());
                }
            }
        }
    }
}

TEST_CASE("npy header: writes structured types in the oldest version that can hold their names") {
    const auto version_of = [](const std::string& name) {
        const auto type = pinflow::dtype::structured({{name, "", pinflow::dtype::of<float>(), {}, 0}}, 4);
        const std::string bytes = pinflow::format_npy_header(type, shape_vector{3});
        CHECK(bytes.size() % 64 == 0);
        CHECK(parse(bytes).dtype == type);
        return static_cast<int>(bytes[6]);
    };
    CHECK(version_of("a") == 1);
    CHECK(version_of("\u00e9") == 1);
    CHECK(version_of("\u00ff\u0080") == 1);
    CHECK(version_of("\u0100") == 3);
    CHECK(version_of("\U0001F600") == 3);
}

TEST_CASE("npy header: writes types that numpy lacks as raw bytes") {
    const auto written = [](const pinflow::dtype& type) {
        return parse(pinflow::format_npy_header(type, shape_vector{3})).dtype.descr();
    };
    const auto bfloat16 = pinflow::dtype::parse("bfloat16");
    CHECK(written(bfloat16) == "|V2");
    CHECK(written(pinflow::dtype::parse("float8_e4m3fn")) == "|V1");
    CHECK(written(pinflow::dtype::parse("float8_e5m2")) == "|V1");
    CHECK(written(pinflow::dtype::structured({{"a", "", bfloat16, {2}, 0}}, 4)) == "[('a', '|V2', (2,))]");
    const auto big = pinflow::dtype::parse(">bfloat16");
    for (const auto& type : {big, pinflow::dtype::structured({{"a", "", big, {}, 0}}, 2)}) {
        CHECK_THROWS_WITH_AS(pinflow::format_npy_header(type, {}),
                             doctest::Contains("convert it to little-endian"), pinflow::invalid_argument);
    }
}

TEST_CASE("npy header: has the same size for every number of rows") {
    const auto inner = pinflow::dtype::structured({{"a", "", pinflow::dtype::parse("<f4"), {2}, 0}}, 8);
    for (const auto& type : {pinflow::dtype::of<float>(), inner}) {
        const std::size_t size = pinflow::format_npy_header(type, shape_vector{0, 3}).size();
        for (const std::uint64_t rows : {std::uint64_t{9}, std::uint64_t{1234567890}, any_size}) {
            CHECK(pinflow::format_npy_header(type, shape_vector{rows, 3}).size() == size);
        }
    }
}

TEST_CASE("npy header: refuses to write what numpy would not read") {
    const auto type = pinflow::dtype::of<float>();
    const auto named = [](std::size_t length) {
        return pinflow::dtype::structured(
            {{std::string(length, 'x'), "", pinflow::dtype::of<float>(), {}, 0}}, 4);
    };
    CHECK(parse(pinflow::format_npy_header(named(9'900), {})).dtype == named(9'900));
    CHECK_THROWS_WITH_AS(pinflow::format_npy_header(named(9'990), {}), doctest::Contains("at most 10000"),
                         pinflow::invalid_argument);
    CHECK_THROWS_AS(pinflow::format_npy_header(named(70'000), {}), pinflow::invalid_argument);
    for (const std::uint64_t alignment : {0u, 1u, 8u, 63u, 96u, 16384u}) {
        CHECK_THROWS_AS(pinflow::format_npy_header(type, shape_vector{3}, false, alignment),
                        pinflow::invalid_argument);
    }
    CHECK_THROWS_AS(pinflow::format_npy_header(type, shape_vector(65, 1)), pinflow::invalid_argument);
    CHECK_THROWS_AS(pinflow::format_npy_header(type, shape_vector{any_size + 1}), pinflow::invalid_argument);
}

TEST_CASE("npy header: a simple type with 64 axes of the largest length fits a header of 8192 bytes") {
    shape_vector long_shape(64, 1);
    long_shape[0] = 0;
    CHECK_NOTHROW(parse(
        pinflow::format_npy_header(pinflow::dtype::parse("<M8[2147483647ns]"), long_shape, true, 8192)));
    shape_vector longest(64, any_size);
    CHECK(
        pinflow::format_npy_header(pinflow::dtype::parse("<M8[2147483647ns]"), longest, true, 8192).size() ==
        8192);
}

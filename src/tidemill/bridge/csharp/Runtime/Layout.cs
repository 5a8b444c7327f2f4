// The constants are made by `python -m tidemill.bridge.protocol.generate` from src/tidemill/bridge/protocol/tables.py. Do not edit.
namespace Tidemill
{
    internal static class Layout
    {
        // BEGIN GENERATED
        public const int TrainerTurn = 0;
        public const int SimulatorTurn = 1;
        public const int CommandStep = 0;
        public const int CommandReset = 1;
        public const int CommandChangeFile = 2;
        public const int CommandClose = 3;
        public const int NameSize = 64;
        public const int MaxName = 63;
        public const string Digest0 = "b08a2094";
        public const string Digest030 = "804e0ed8";
        public const string Digest032 = "e0c41017";

        internal static class V0
        {
            public const int FileLength = 0;
            public const int Version = 4;
            public const int Turn = 8;
            public const int Command = 9;
            public const int SideCapacity = 10;
            public const int SideBase = 14;
            public const int SideLength = 14;
            public const int SideData = 18;
            public const int HeaderSize = 22;
            public const int EmptySize = 22;
        }

        internal static class V3
        {
            public const int Major = 0;
            public const int Minor = 4;
            public const int Bug = 8;
            public const int SimulatorBlocked = 12;
            public const int TrainerBlocked = 13;
            public const int Reset = 14;
            public const int Closed = 15;
            public const int BodyNumber = 16;
            public const int SideBytes = 20;
            public const int RlBytes = 24;
            public const int Query = 28;
            public const int HeaderSize0 = 28;
            public const int HeaderSize2 = 29;
        }
        // END GENERATED
    }
}
